"""Puts the fleet to sleep after a pause, and wakes it before the stage goes on.

Invariants:

- Engines are claimed in the step that found the stage paused: from there on none gets a request before it was woken.
- A pause that ran out of time says so of an engine, and leaves it to fall asleep; whoever wakes it waits for that.
- One that does not wake, or whose weights are gone, is out of traffic, named, before the gate opens.
- A caller that leaves changes nothing: engines are put to sleep and woken by tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rollout_svc.engines.memory import TAGS, Tag
from rollout_svc.gate import LANES, Lane
from rollout_svc.pause.offload import Offloaded, in_the_way
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.sleeping import Sleeping
from rollout_svc.workers.worker import Sleep, Worker, WorkerState

__all__ = ["Offloading"]

_LOST = "its weights were given up, and none came since"


class Offloading:
    """The fleet's memory, given up and taken back; see the module's invariants."""

    def __init__(
        self, *, pool: WorkerPool, sleeping: Sleeping, tasks: TaskOwner, drained: Callable[[], frozenset[Lane]]
    ) -> None:
        """`drained`: the lanes that are closed, with nothing running."""
        self._pool = pool
        self._sleeping = sleeping
        self._tasks = tasks
        self._drained = drained

    @property
    def sleeps(self) -> bool:
        """Whether engines in traffic sleep, or a pause still has what others gave up."""
        asleep = (w.asleep is not None for w in self._pool.workers.values() if w.state is WorkerState.ACTIVE)
        return self._sleeping.lent or any(asleep)

    @property
    def weightless(self) -> list[str]:
        """Workers in traffic whose engines have no weights to be written to, or may have none."""
        workers = self._pool.workers.values()
        return [w.worker_id for w in workers if w.weightless and w.state is WorkerState.ACTIVE]

    async def offload(self, tags: frozenset[Tag], until: float) -> Offloaded:
        """Put every idle engine to sleep; returns by `until`, loop time, with what came of it."""
        outcome = Offloaded()
        workers = list(self._pool.workers.values())
        if not self._drained() >= frozenset(LANES):
            outcome.kept = {worker.worker_id: "the stage went on" for worker in workers}
            return outcome
        self._sleeping.lent = True
        outcome.kept = {w.worker_id: reason for w in workers if (reason := in_the_way(w)) is not None}
        claimed = {worker.worker_id: worker for worker in workers if worker.worker_id not in outcome.kept}
        moves = {}
        for worker_id, worker in claimed.items():
            worker.asleep = worker.asleep or Sleep()
            moves[worker_id] = self._tasks.spawn(f"offload:{worker_id}", self._sleeping.offload(worker, tags))
        if moves:
            await asyncio.wait(moves.values(), timeout=max(0.0, until - asyncio.get_running_loop().time()))
        for worker_id, worker in claimed.items():
            outcome.workers[worker_id] = [] if worker.asleep is None else list(worker.asleep.listed)
            reason = moves[worker_id].result() if moves[worker_id].done() else "it is still on its way to sleep"
            if reason is not None:
                outcome.kept[worker_id] = reason
        return outcome

    async def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Wake what sleeps; with all tags, for good: who has no weights then, or does not wake, is out of traffic."""
        tags = tuple(tags)
        for_good = set(tags) >= set(TAGS)
        if for_good:
            self._sleeping.lent = False
        sleepers = [w for w in self._pool.workers.values() if w.asleep is not None and not w.absent]
        moves = [self._tasks.spawn(f"wake:{w.worker_id}", self._wake(w, tags, for_good=for_good)) for w in sleepers]
        if moves:
            await asyncio.wait(moves)
        self._pool.changed()

    async def wake_for_others(self, timeout_s: float) -> None:
        """Leave no engine asleep behind: whoever comes next may not know; at most `timeout_s`."""
        if self.sleeps:
            await asyncio.wait({self._tasks.spawn("wake:all", self.wake())}, timeout=timeout_s)

    async def _wake(self, worker: Worker, tags: tuple[Tag, ...], *, for_good: bool) -> None:
        reason = await self._sleeping.wake(worker, tags)
        if worker.state not in (WorkerState.ACTIVE, WorkerState.QUARANTINED):
            return  # its supervisor wakes it when it is back
        worker.refusals = 0
        if reason is not None:
            worker.put_in_quarantine("version", f"it does not wake: {reason}")
        elif for_good and worker.weights_lost:
            worker.put_in_quarantine("version", _LOST)
