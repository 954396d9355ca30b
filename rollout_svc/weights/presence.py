"""A part of an update ends when its worker does, and the whole of it when who was out is back.

Invariants:

- Nobody waits for the answer of an engine that is known to be gone.
- Only its supervisor brings a worker into traffic: what is done here is to wait for that, and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

from rollout_svc.errors import WorkerFailure
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.phases import Phases
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Presence"]

_LOOK_S: Final = 10.0  # seconds for the look at an engine that was out: a question or two


class Presence:
    """Knows who is there."""

    def __init__(self, pool: WorkerPool, tasks: TaskOwner) -> None:
        self._pool = pool
        self._tasks = tasks

    async def during(self, worker: Worker, work: Coroutine[Any, Any, None]) -> None:
        """Carry out a part of an update for as long as its worker is there; raises WorkerFailure, also when it goes."""
        task = self._tasks.spawn(f"update:{worker.worker_id}", work, handled=True)
        gone = asyncio.Event()

        def look() -> None:
            known = self._pool.workers.get(worker.worker_id) is worker
            if not known or worker.state in (WorkerState.DEAD, WorkerState.DRAINING):
                gone.set()

        unsubscribe = self._pool.subscribe(look)
        waiting = self._tasks.spawn(f"gone:{worker.worker_id}", gone.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WorkerFailure("worker_dead", f"{worker.state}: {worker.reason}")
            task.result()
        finally:
            unsubscribe()
            waiting.cancel()
            task.cancel()

    async def returned(self, updated: Iterable[Worker], phases: Phases) -> None:
        """Wait until those that were out for their version alone, and have it, are in traffic, or told why not.

        The next update may follow at once, and would find an engine in the hands of its supervisor.
        """
        healed = [worker for worker in updated if self._waits(worker)]
        if not healed:
            return
        over = asyncio.Event()

        def look() -> None:
            if not any(self._waits(worker) for worker in healed):
                over.set()

        for worker in healed:
            worker.reason = f"it has version {worker.version}, and is looked at"
        unsubscribe = self._pool.subscribe(look)
        try:
            with phases.during("confirm"), suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await over.wait()
        finally:
            unsubscribe()

    def _waits(self, worker: Worker) -> bool:
        known = self._pool.workers.get(worker.worker_id) is worker and not worker.refusals
        return known and worker.quarantine is not None and worker.quarantine.kind == "version"
