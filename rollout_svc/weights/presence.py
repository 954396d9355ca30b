"""A part of an update ends when its worker does.

Invariant: nobody waits for the answer of an engine that is known to be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollout_svc.errors import WorkerFailure
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Presence"]


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
