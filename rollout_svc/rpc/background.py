"""An event loop in a thread of its own, for callers that block.

Invariants:

- The thread starts with the first call, and `close` ends it; a call after that starts another.
- A call that is interrupted is cancelled. What still runs at the end is cancelled too: no caller waits on.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["BackgroundLoop"]

T = TypeVar("T")
_END_S: Final = 30.0
"""Bound of each step of the end, seconds."""


class BackgroundLoop:
    """Runs coroutines for blocking callers, of any thread."""

    __slots__ = ("_lock", "_loop", "_thread")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether the thread runs."""
        return self._loop is not None

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one call, and return or raise what it does; interrupting the wait cancels the call."""
        with self._lock:  # so that no call slips in behind `close`, where nothing would run it
            future = asyncio.run_coroutine_threadsafe(call, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a last call in the thread, where it runs, and end it; idempotent, safe before the first call."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(last(), loop).result(_END_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="rollout-client", daemon=True)
            self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; then end what still runs in it, so that no caller waits on."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
    finally:
        loop.close()
