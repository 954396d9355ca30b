"""Freezing engines with their requests inside, and letting them go on.

Invariants:

- One attempt at a time per worker, so that a freeze and a thaw never overtake each other on the wire.
- A worker counts as frozen only when its engine confirmed; from the first attempt on it gets no new request.
- A freeze whose fate is unknown is thawed like any other, and again for a while, for it may still arrive: a worker that
  may be frozen is never left so. While a thaw may still arrive, a worker cannot be frozen.
- No worker goes on while weights are on their way to it. One where they ended half-way loses its requests first, and
  keeps what they have: it would die of the next token, or make it of no version.
- A worker that does not go on loses its requests and is quarantined; its supervisor keeps trying to thaw it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.engines import Call
from rollout_svc.errors import WorkerFailure
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.control import CONTROL_TIMEOUT_S, Control
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Cache, Freeze, Worker, WorkerState

__all__ = ["Freezing", "can_freeze"]

_CAPABILITY: Final[dict[Cache, str]] = {"keep": "freeze_keep_kv", "drop": "freeze_drop_kv"}
_THAW_S: Final = 10.0  # seconds an engine has to go on before what it holds is given up
_LATE_S: Final = 30.0  # seconds in which a call without an answer may still arrive
_NO_ROUTE: Final = frozenset({"http_404", "http_405", "http_501"})
_FIRST_RETRY_S: Final = 0.05  # seconds between two attempts, doubling
_RETRY_CAP_S: Final = 1.0


def can_freeze(worker: Worker, cache: Cache) -> bool:
    """Whether this worker's engine can be frozen so, and is ours alone: a freeze holds everything that runs there."""
    return worker.exclusive and _CAPABILITY[cache] in worker.capabilities


class Freezing:
    """Freezes and thaws; the state is each worker's `freeze`."""

    def __init__(self, *, pool: WorkerPool, control: Control, tasks: TaskOwner) -> None:
        self._pool = pool
        self._control = control
        self._tasks = tasks
        self._going_on: set[str] = set()

    @property
    def frozen(self) -> list[Worker]:
        """Workers that are frozen, or may be."""
        return [worker for worker in self._pool.workers.values() if worker.freeze is not None]

    @staticmethod
    def may_thaw(worker: Worker, until: float) -> bool:
        """Whether a thaw that was given up may still arrive by then; one under way is waited for by whoever freezes."""
        return worker.thaw_until >= until and not worker.switching.locked()

    async def freeze(self, worker: Worker, cache: Cache, timeout_s: float) -> bool:
        """Make one attempt; returns whether the engine confirmed. One that is being thawed is not frozen again."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s), worker.switching:
                if worker.freeze is None:
                    worker.freeze = Freeze(cache, loop.time())
                elif worker.freeze.thawing or worker.freeze.cache != cache:
                    return False
                if loop.time() < worker.thaw_until:
                    return False
                if not worker.freeze.confirmed:
                    before, worker.freeze_until = worker.freeze_until, loop.time() + _LATE_S
                    worker.freeze.confirmed = await self._sent(worker, worker.dialect.freeze(cache), timeout_s)
                    if worker.freeze.confirmed:
                        worker.freeze_until = before
                return worker.freeze.confirmed
        except TimeoutError:
            return False

    async def thaw(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Make one attempt to let an engine go on; returns whether it does."""
        if worker.freeze is not None and not worker.loading:
            worker.freeze.thawing = True
        try:
            async with asyncio.timeout(timeout_s), worker.switching:
                if worker.freeze is None:
                    return True
                if worker.loading:
                    return False
                worker.freeze.thawing = True
                if not await self._thaw(worker, timeout_s):
                    return False
                worker.thawed(asyncio.get_running_loop().time())
        except TimeoutError:
            return False
        self._pool.thawed(worker)
        return True

    async def thaw_found(self, worker: Worker) -> bool:
        """Let an engine go on that nobody here froze, but maybe a service that died; false where it does not say."""
        async with worker.switching:
            if worker.freeze is None and any(can_freeze(worker, cache) for cache in _CAPABILITY):
                return await self._thaw(worker, CONTROL_TIMEOUT_S)
        return True

    async def thaw_late(self, worker: Worker) -> bool:
        """Undo a freeze that may have arrived after it was given up; returns whether none is in force for certain.

        What waits at a frozen engine's door is in no count of its own, so a count is only believed after this.
        """
        if asyncio.get_running_loop().time() < worker.freeze_until:
            return await self.thaw_found(worker)
        return True

    def thaw_all(self) -> None:
        """Let every frozen engine go on, beside everything else; each gets requests again once it confirmed."""
        for worker in self.frozen:
            if worker.freeze is not None and worker.worker_id not in self._going_on:
                worker.freeze.thawing = True
                self._going_on.add(worker.worker_id)
                self._tasks.spawn(f"thaw:{worker.worker_id}", self._thaw_in_time(worker))

    async def _thaw_in_time(self, worker: Worker) -> None:
        loop, delay = asyncio.get_running_loop(), _FIRST_RETRY_S
        end = loop.time() + _THAW_S
        try:
            while worker.freeze is not None and worker.state is not WorkerState.DEAD:
                if await self.thaw(worker) or loop.time() + delay >= end:
                    break
                await asyncio.sleep(delay)
                delay = min(_RETRY_CAP_S, 2 * delay)
        finally:
            self._going_on.discard(worker.worker_id)
        if worker.freeze is not None and worker.state is not WorkerState.DEAD:
            worker.put_in_quarantine("residual", f"it does not go on after a freeze, {_THAW_S:g} s long")
            for call in list(worker.calls.values()):
                call.cancel("worker_dead")

    async def _thaw(self, worker: Worker, timeout_s: float) -> bool:
        if worker.half_loaded and not await self._emptied(worker, timeout_s):
            return False
        before, worker.thaw_until = worker.thaw_until, asyncio.get_running_loop().time() + _LATE_S
        done = await self._sent(worker, worker.dialect.thaw(), timeout_s, absent=worker.freeze is None)
        if done:
            worker.thaw_until = before
        return done

    async def _emptied(self, worker: Worker, timeout_s: float) -> bool:
        """Abort what it holds while it holds it; returns whether it was told."""
        calls = list(worker.calls.values())
        for call in calls:
            call.aborts += 1
        return await self._sent(worker, worker.dialect.abort([call.request_id for call in calls]), timeout_s)

    async def _sent(self, worker: Worker, calls: list[Call], timeout_s: float, *, absent: bool = False) -> bool:
        """Make the calls; `absent`: an engine that has no such route is as well, for nobody can have frozen it."""
        try:
            await self._control.do(worker, calls, timeout_s)
        except WorkerFailure as failure:
            return absent and failure.kind in _NO_ROUTE
        return True
