"""Waiting for engines that may still be loading.

Invariant: the wait ends with every engine reached, or with an error that names those that were not; meanwhile it says
every few seconds who is waited for.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.errors import RolloutError
from rollout_svc.events import EnginesLoading, EventBus
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import WorkerState

__all__ = ["StartTimeout", "wait_for_engines"]

_PROGRESS_S: Final = 5.0  # seconds between two words about engines that are still loading


class StartTimeout(RolloutError):
    """Raised when engines did not answer within `start_timeout_s`; names them."""


async def wait_for_engines(pool: WorkerPool, bus: EventBus, timeout_s: float) -> None:
    """Return once no worker is STARTING.

    Raises:
        StartTimeout: after `timeout_s`, naming the silent ones and what was last heard of them.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    unsubscribe = pool.subscribe(changed.set)
    started = loop.time()
    deadline = started + timeout_s
    try:
        while True:
            waiting = {
                worker.worker_id: f"{worker.endpoint.url}: {worker.reason}"
                for worker in pool.workers.values()
                if worker.state is WorkerState.STARTING
            }
            if not waiting:
                return
            if loop.time() >= deadline:
                silent = "; ".join(f"{name} at {reason}" for name, reason in waiting.items())
                raise StartTimeout(f"no answer within start_timeout_s = {timeout_s:g} s: {silent}")
            changed.clear()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _PROGRESS_S)):
                    await changed.wait()
            except TimeoutError:
                elapsed_s = round(loop.time() - started, 1)
                bus.emit(EnginesLoading(waiting, len(pool.workers) - len(waiting), elapsed_s, timeout_s))
    finally:
        unsubscribe()
