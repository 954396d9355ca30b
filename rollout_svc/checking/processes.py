"""The service's own processes for synchronous plugins, counted: while one works, time is real.

Invariant: its threads and processes are none of the plugin's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from typing import Any

from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.leftovers import children, lives
from rollout_svc.judge_processes import PebbleRunner
from rollout_svc.plugins import PluginSpec

__all__ = ["Processes"]


class Processes:
    """Runs synchronous plugins in a process that can be killed; see `judging.ProcessRunner`."""

    __slots__ = ("_loop", "_runner", "_seen")

    def __init__(self, loop: CheckLoop) -> None:
        self._loop = loop
        self._runner = PebbleRunner(max_workers=1)
        self._seen: set[int] = set()

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Run `method(payload)` of the plugin in a process."""
        before = set(threading.enumerate())
        future = self._runner.submit(spec, method, payload, timeout_s)
        self._loop.own_threads.update(set(threading.enumerate()) - before)
        self._loop.own_work += 1
        future.add_done_callback(self._ended)
        return future

    def below(self) -> set[int]:
        """Processes that plugins have begun in ours, and those of ours that were killed have left behind."""
        pool = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        self._seen.update(pid for worker in pool for pid in children(worker))
        return {pid for pid in self._seen if lives(pid)}

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._loop.own_work -= 1

    async def close(self) -> None:
        """Kill what runs and end the processes; idempotent."""
        await self._runner.close()
