"""Who asks for a pause, and for its end.

Invariants:

- What means nothing is refused before anything is stopped.
- The gate opens in the step that found no pause and no update under way, and no engine asleep that is in traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from rollout_svc.config import PauseConfig
from rollout_svc.engines.memory import Tag
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.offload import read_offload
from rollout_svc.pause.offloading import Offloading
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.request import Asked, read_terms
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.calls import WeightCalls
from rollout_svc.workers.pool import WorkerPool

__all__ = ["PauseCalls"]


class PauseCalls:
    """The calls that stop the stage, and start it again; see the module's invariants.

    Attributes:
        resuming: callers that wait for it to go on.
    """

    def __init__(
        self,
        pauses: PauseController,
        offloading: Offloading,
        pool: WorkerPool,
        tasks: TaskOwner,
        config: PauseConfig,
        weights: WeightCalls,
        check: Callable[[], None],
    ) -> None:
        """Make the calls.

        Args:
            pauses: who climbs.
            offloading: who puts engines to sleep.
            pool: the engines.
            tasks: who carries a pause that does.
            config: what holds where a caller does not say.
            weights: who moves weights meanwhile.
            check: raises where the service does not run, or has failed.
        """
        self.resuming = 0
        self._pauses = pauses
        self._offloading = offloading
        self._tasks = tasks
        self._pool = pool
        self._config = config
        self._weights = weights
        self._check = check

    async def pause(self, asked: Asked) -> PauseReport:
        """Stop the stage; see `RolloutService.pause`."""
        workers = self._pool.workers.values()
        mode, cache, deadline, lanes = read_terms(asked, self._config, workers)
        tags = read_offload(asked.offload, mode, lanes, workers)
        climb = partial(
            self._pauses.pause, mode=mode, deadline_s=deadline, lanes=lanes, if_ticket=asked.if_ticket, cache=cache
        )
        if not tags:
            return await climb()
        work = self._pause_and_offload(climb, tags, asyncio.get_running_loop().time() + deadline)
        carried = self._tasks.spawn("pause:offload", work, handled=True)
        carried.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller may have left
        report: PauseReport = await asyncio.shield(carried)
        return report

    async def _pause_and_offload(
        self, climb: Callable[[], Awaitable[PauseReport]], tags: frozenset[Tag], until: float
    ) -> PauseReport:
        """Climb, then have engines sleep in what is left of the time."""
        report = await climb()
        outcome = await self._offloading.offload(tags, until)
        told = replace(report, offloaded=outcome.workers, not_offloaded=outcome.kept)
        if self._pauses.last_report is report:
            self._pauses.last_report = told
        return told

    async def resume(self, ticket: int | None, weight_version: int | None) -> None:
        """Open the gate; see `RolloutService.resume`."""
        self._pauses.check_resume(ticket)
        self.resuming += 1
        try:
            while True:
                await self._pauses.report()
                if self._weights.updating is not None:
                    await asyncio.wait({self._weights.updating})
                    continue
                if weight_version is not None:
                    await self._weights.assert_version(weight_version)
                if self._offloading.sleeps:
                    await self._offloading.wake()
                    continue
                # What was awaited may have changed everything: looked at again in the step that opens the gate.
                self._check()
                if self._weights.updating is None and not self._pauses.climbing:
                    self._pauses.resume(ticket)
                    return
        finally:
            self.resuming -= 1
