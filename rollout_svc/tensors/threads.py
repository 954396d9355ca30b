"""Where heavy work is done: off the event loop, a few at a time.

Invariants:

- Whatever was submitted before `close` ends, or never begins and its future is cancelled.
- Nobody who stops waiting stops the work: whoever submits says what becomes of a result that comes too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

__all__ = ["Threads", "WorkThreads"]

T = TypeVar("T")


class Threads(Protocol):
    """Does work beside the loop."""

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do it; the future is the running loop's, and is not to be cancelled while somebody may need its result."""

    async def close(self) -> None:
        """Begin nothing more; idempotent."""


class WorkThreads:
    """Threads of this process, started when there is something to do."""

    def __init__(self, threads: int) -> None:
        """Make them; `threads`: how many at most."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tensors")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do it in one of them, in its turn."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)
