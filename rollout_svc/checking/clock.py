"""An event loop in which an hour passes at once, unless something real is under way.

Invariants:

- Where nothing is ready, the clock jumps to the next timer.
- While a thread, a socket or another process of the plugin works, time is real: its own time-outs mean what they say.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = ["CheckLoop"]

_SLICE_S: Final = 0.02  # of real time that is waited before it is looked again whether anything real is under way
_IDLE: Final = "asyncio_"  # how threads of a loop's own pool are called, which wait for work for ever


class _Jumping(selectors.DefaultSelector):
    """Adds what it was asked to wait to its clock, in place of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0
        self.busy: Callable[[], bool] = lambda: False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None or self.busy():
            began = time.monotonic()
            ready = super().select(_SLICE_S if timeout is None else min(timeout, _SLICE_S))
            self.now += time.monotonic() - began
            return ready
        self.now += timeout
        return ready


class CheckLoop(asyncio.SelectorEventLoop):
    """A selector loop on a clock of its own, which knows what is done outside it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.jobs: dict[asyncio.Future[Any], str] = {}  # in threads: what they call
        self.own_threads: set[threading.Thread] = set(threading.enumerate())
        self.own_work = 0  # calls in our processes
        self._jumping.busy = self._busy

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now

    @property
    def turns(self) -> int:
        """How often it has looked for what is ready: it stands still while something holds the loop."""
        return self._jumping.turns

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a function in a thread, and know of it until it has ended, whoever still waits for it."""
        name = _name_of(func)
        ended: asyncio.Future[Any] = self.create_future()
        self.jobs[ended] = name

        def tell() -> None:
            self.jobs.pop(ended, None)

        def run() -> Any:
            try:
                return func(*args)
            finally:
                if not self.is_closed():
                    self.call_soon_threadsafe(tell)

        return super().run_in_executor(executor, run)

    async def shutdown_default_executor(self) -> None:
        """Let go of the loop's threads; those that hang would be waited for, and for ever."""
        executor = getattr(self, "_default_executor", None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def foreign_threads(self) -> list[threading.Thread]:
        """Threads that were begun since, by nobody here."""
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self.own_threads and not thread.name.startswith(_IDLE)
        ]

    def _busy(self) -> bool:
        sockets = len(self._jumping.get_map()) > 1  # one is the loop's own
        return bool(self.jobs) or sockets or self.own_work > 0 or bool(self.foreign_threads())


def _name_of(func: Any) -> str:
    while hasattr(func, "func"):  # a partial, as `asyncio.to_thread` makes: what it runs is its first argument
        inner = func.args[0] if func.args and callable(func.args[0]) else func.func
        func = inner
    return getattr(func, "__qualname__", repr(func))
