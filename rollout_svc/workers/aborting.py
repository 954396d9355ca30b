"""Aborts, on the control lane.

Invariants:

- An abort is one short attempt; whoever needs more of it asks again.
- Those of calls that were dropped go a few at a time, so that a pause's abort finds a free control connection.
"""

from __future__ import annotations

import asyncio

from rollout_svc.errors import WorkerFailure
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.call import AbortReason, EngineCall
from rollout_svc.workers.control import CONTROL_TIMEOUT_S, Control
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Aborting"]


class Aborting:
    """See the module's invariants."""

    def __init__(self, control: Control, tasks: TaskOwner) -> None:
        self._control = control
        self._tasks = tasks

    def at_engine(self, worker: Worker, call: EngineCall, reason: AbortReason) -> None:
        """Tell the engine, beside everything else, that nobody waits for this request any more."""
        call.cancelled_for = call.cancelled_for or reason
        if worker.state is not WorkerState.DEAD:
            self._tasks.spawn(f"abort:{call.request_id}", self._abort_one(worker, call.request_id), handled=True)

    async def _abort_one(self, worker: Worker, request_id: str) -> None:
        """A few at a time: a pause's abort must find a free control connection, however many calls were dropped."""
        async with worker.single_aborts:
            await self.abort(worker, [request_id])

    async def abort(self, worker: Worker, request_ids: list[str] | None, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Send one abort (by id, or of everything for None); returns whether it was taken.

        An engine that refuses one id is told the others all the same.
        """
        end, taken = asyncio.get_running_loop().time() + timeout_s, True
        for call in worker.dialect.abort(request_ids):
            remaining = end - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            try:
                await self._control.do(worker, [call], remaining)
            except WorkerFailure as failure:
                taken = False
                if failure.kind == "connection":
                    break  # nobody is there
        return taken
