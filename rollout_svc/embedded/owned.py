"""Work that goes on to its end, whoever waits for it.

Invariant: a caller that is cancelled leaves the work alone; only its wait ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["OwnedWork"]

T = TypeVar("T")


class OwnedWork:
    """Tasks that belong to the engine; see the module's invariant."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that goes on to its end even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work, name="weights")
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Wait until none of it is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _disown(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at here, for the caller may have left
