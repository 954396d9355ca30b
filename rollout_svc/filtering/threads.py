"""Calls that may block, or never return: each in a daemon thread of its own, a few at once.

Invariants:

- A call ends for its caller once: with its result, its error, at its time limit, or when the caller is cancelled. Its
  thread cannot be ended; it keeps its place until it returns, and what it returns then goes nowhere.
- The time limit starts with the thread: waiting for a place is not counted.
- Who waits for a place waits while one can still come free in time: once every thread is past its limit, whoever waits
  or comes is refused at once.
- The threads are daemons and nobody joins them: one that hangs for ever keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

__all__ = ["AT_ONCE", "CallThreads", "NoThread"]

AT_ONCE: Final = 4
"""Calls at once: they share the interpreter with the event loop."""


class NoThread(Exception):
    """Raised when every thread has run for longer than it may."""


class _Call:
    """One thread under way."""

    __slots__ = ("answer", "overdue", "timer")

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self.answer = answer
        self.overdue = False
        self.timer: asyncio.TimerHandle | None = None


class CallThreads:
    """Runs calls in threads; used in one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = 0
        self._overdue = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<CallThreads {self._name} running={self._running} overdue={self._overdue}>"

    async def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Return what `function()` returns, or raise what it raises, `BaseException` included.

        Raises:
            TimeoutError: it did not return in time; its thread goes on.
            NoThread: all threads are past their limits.
        """
        await self._enter()
        loop = asyncio.get_running_loop()
        call = _Call(loop.create_future())
        thread = threading.Thread(target=self._work, args=(function, call, loop), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            self._leave()
            raise
        call.timer = loop.call_later(timeout_s, self._past_limit, call)
        return await call.answer

    async def _enter(self) -> None:
        if self._running < AT_ONCE:
            self._running += 1
            return
        self._refuse_when_all_hang()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave()  # it was given just now, and nobody will use it
            raise

    def _refuse_when_all_hang(self) -> None:
        if self._overdue >= AT_ONCE:
            raise NoThread(f"{self._overdue} earlier calls have not returned")

    def _leave(self) -> None:
        """Give the place to whoever waits longest, or back."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._running -= 1

    def _past_limit(self, call: _Call) -> None:
        call.overdue = True
        self._overdue += 1
        if not call.answer.done():
            call.answer.set_exception(TimeoutError())
        if self._overdue >= AT_ONCE:
            waiting, self._waiting = self._waiting, deque()
            for place in waiting:
                if not place.done():
                    place.set_exception(NoThread(f"{self._overdue} earlier calls have not returned"))

    def _work(self, function: Callable[[], Any], call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Run in the thread."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - raised again where the call was made
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(self._returned, call, result, error)

    def _returned(self, call: _Call, result: Any, error: BaseException | None) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.overdue:
            self._overdue -= 1
        self._leave()
        if call.answer.done():
            return
        if error is not None:
            call.answer.set_exception(_raisable(error))
        else:
            call.answer.set_result(result)


def _raisable(error: BaseException) -> Exception:
    """What a future can hold and the loop survives: an exit and a StopIteration become errors with their names."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | TimeoutError):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
