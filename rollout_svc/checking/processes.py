"""The service's own processes for synchronous plugins, in a loop of their own: their time is real.

Invariants:

- Their threads, sockets and processes are none of the plugin's; what a plugin starts in them is.
- While one of them works, the time of the check is real as well.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final

from rollout_svc.checking import leftovers
from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.leftovers import Left, children, lives, wardens
from rollout_svc.checking.threads import LEFT
from rollout_svc.judging import JudgerError
from rollout_svc.judging.processes import JudgePool
from rollout_svc.plugins import PluginSpec

__all__ = ["Processes"]

_CLOSE_S: Final = 20.0
_ASK_S: Final = 10.0  # for an answer: another process may have to start first


class Processes:
    """Runs synchronous plugins in a process that can be killed; see `judging.ProcessRunner`."""

    __slots__ = ("_check", "_loop", "_pool", "_seen", "_thread")

    def __init__(self, check: CheckLoop) -> None:
        self._check = check
        self._pool = JudgePool(max_workers=1)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._seen: set[int] = set()

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Run `method(payload)` of the plugin in a process."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="asyncio_processes", daemon=True)
            self._thread.start()

        async def call() -> Any:
            return await self._pool.submit(spec, method, payload, timeout_s)

        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))
        self._check.own_work += 1
        future.add_done_callback(self._ended)
        return future

    def below(self) -> set[int]:
        """Processes that plugins have begun in ours, and that live still."""
        workers = [worker for warden in wardens() for worker in children(warden)]
        self._seen.update(pid for worker in workers for pid in children(worker))
        return {pid for pid in self._seen if lives(pid)}

    async def threads(self) -> list[Left]:
        """Threads that plugins have begun in ours since they were last asked for, and that run still."""
        if self._thread is None:
            return []
        moment_s = leftovers.MOMENT_S
        try:
            found = await self.submit(LEFT, "__call__", moment_s, moment_s + _ASK_S)
        except (TimeoutError, JudgerError):  # its process ended, and its threads with it
            return []
        return [Left(f"the thread {name!r} runs on", where) for name, where in found]

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._check.own_work -= 1

    async def close(self) -> None:
        """Kill what runs and end the processes; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_CLOSE_S)
        if not self._loop.is_closed() and not self._loop.is_running():
            self._loop.close()
