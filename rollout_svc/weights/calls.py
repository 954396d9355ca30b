"""Who asks for new weights, and for the word of every engine that it has some.

Invariants:

- One update at a time; a caller that leaves ends its own wait, and the update goes on.
- Weights that engines gave up are back before any are loaded; their caches, when the stage goes on.
- An update that made the pause around it ends that pause, unless somebody else asked for one meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollout_svc.errors import Conflict
from rollout_svc.gate import LANES
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.offloading import Offloading
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.fleet import Fleet, Source
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.request import refuse_undrained
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.pool import WorkerPool

__all__ = ["WeightCalls"]


class WeightCalls:
    """The calls that move weights; see the module's invariants."""

    def __init__(
        self,
        *,
        tasks: TaskOwner,
        pauses: PauseController,
        offloading: Offloading,
        updater: WeightUpdater,
        fleet: Fleet,
        pool: WorkerPool,
        pause: Callable[..., Awaitable[object]],
        check: Callable[[], None],
        runs: Callable[[], bool],
    ) -> None:
        """Make the calls.

        Args:
            tasks: who carries an update.
            pauses: who knows what is drained.
            offloading: who wakes engines.
            updater: who moves the weights.
            fleet: which weights there are.
            pool: the engines.
            pause: the service's own, with its arguments unread.
            check: raises where the service does not run, or has failed.
            runs: whether it is neither starting nor stopping.
        """
        self._tasks = tasks
        self._pauses = pauses
        self._offloading = offloading
        self._updater = updater
        self._fleet = fleet
        self._pool = pool
        self._pause = pause
        self._check = check
        self._runs = runs
        self._updating: asyncio.Task[dict[str, Any]] | None = None

    @property
    def updating(self) -> asyncio.Task[dict[str, Any]] | None:
        """The update under way."""
        return self._updating

    async def update(self, version: int, source: Source, pause: Mapping[str, Any] | None) -> dict[str, Any]:
        """Bring every worker to `version`; while running, inside of `pause`. A failed one leaves the stage paused."""
        if self._updating is not None:
            raise Conflict("another weight update is under way", type="updating")
        work = self._update(version, source, pause)
        self._updating = self._tasks.spawn(f"weights:{version}", work, handled=True)
        try:
            return await asyncio.shield(self._updating)
        finally:
            if self._updating.done():
                self._updating = None
            else:
                self._updating.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._updating = None
        if not task.cancelled():
            task.exception()

    async def _update(self, version: int, source: Source, pause: Mapping[str, Any] | None) -> dict[str, Any]:
        pauses = self._pauses
        was_running = pauses.state == "running"
        asked = pauses.asked + 1
        phases = Phases(asyncio.get_running_loop().time)
        if not source.moves:
            self._refuse_weightless("nobody can have moved weights there")
        if was_running:
            if pause is None:
                raise Conflict("the stage is running: pause it first, or pass `pause`", type="not_paused")
            refuse_undrained(pause.get("lanes", LANES))
            with phases.during("pause"):
                await self._pause(**pause)
            self._check()
        refuse_undrained(pauses.drained)
        await self._offloading.wake(("weights",))  # so that there is something to load into
        self._refuse_weightless("another pause put them to sleep")
        record = await self._updater.update(version, source, phases, since=pauses.closed_at)
        # Whoever else paused since the call began got this pause's ticket, and is owed a stage that stays paused.
        if was_running and self._runs() and pauses.asked == asked and not pauses.climbing:
            with phases.during("resume"):
                await self._offloading.wake()
                if self._runs() and pauses.asked == asked and not pauses.climbing:
                    pauses.resume()
        return record

    def _refuse_weightless(self, why: str) -> None:
        if asleep := self._offloading.weightless:
            words = f"{', '.join(asleep)} gave their weights up, and sleep: {why}"
            raise Conflict(words, type="asleep", detail={"workers": asleep})

    async def assert_version(self, version: int) -> None:
        """Raise Conflict unless every worker in traffic reports `version`, and there is one."""
        active = self._pool.active
        labels = await asyncio.gather(*(self._fleet.ask(worker) for worker in active))
        reported = {worker.worker_id: label for worker, label in zip(active, labels, strict=True)}
        if not active or any(found != version for found in reported.values()):
            raise Conflict(
                f"not every worker in traffic reports weight version {version}",
                type="weight_version",
                detail={"weight_version": version, "workers": reported},
            )
