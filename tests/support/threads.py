"""Threads by hand: work is done when a test says so, and the test sees what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["HandThreads"]

T = TypeVar("T")


class HandThreads:
    """Work that waits.

    Attributes:
        waiting: what was submitted and is not done.
        at_once: do everything as it comes.
        submitted: there was something to do.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.at_once = at_once
        self.submitted = asyncio.Event()
        self.closed = False

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Keep it for later."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.waiting.append((work, result))
        self.submitted.set()
        if self.at_once:
            self.work()
        return result

    def begin(self) -> None:
        """Do all that waits, and tell nobody yet."""
        self.waiting = [(_known(work()), result) for work, result in self.waiting]

    def work(self) -> None:
        """Do all that waits."""
        waiting, self.waiting = self.waiting, []
        for work, result in waiting:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - carried over
                result.set_exception(error)

    async def close(self) -> None:
        """What has not begun never does."""
        self.closed = True
        waiting, self.waiting = self.waiting, []
        for _, result in waiting:
            result.cancel()


def _known(result: T) -> Callable[[], T]:
    return lambda: result
