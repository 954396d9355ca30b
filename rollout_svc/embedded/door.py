"""The door before the scheduler: where requests wait during a pause or a change of weights.

Invariants:
- While the door is closed nobody enters; those who wait enter in the order they came once it opens.
- Inside `exclusively` nobody is inside, and nobody enters until it ends.
- A waiter leaves exactly once: let in, turned away, or cancelled.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Door:
    """Lets requests in one by one, and knows how many are inside. Used in one event loop."""

    def __init__(self) -> None:
        self.paused = False
        self.inside = 0
        self._writers = 0
        self._writing = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._waiting: dict[str, asyncio.Future[bool]] = {}

    def __repr__(self) -> str:
        return f"<Door {'closed' if self.closed else 'open'} inside={self.inside} waiting={len(self._waiting)}>"

    @property
    def closed(self) -> bool:
        """Whether newcomers wait."""
        return self.paused or self._writers > 0

    @property
    def waiting(self) -> int:
        """How many wait outside."""
        return len(self._waiting)

    async def enter(self, rid: str) -> bool:
        """Wait until the door is open and go in.

        Args:
            rid: A name that no other waiter has.

        Returns:
            Whether it went in (and owes a `leave`); False when it was turned away.
        """
        while self.closed:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[rid] = waiter
            try:
                if not await waiter:
                    return False
            finally:
                del self._waiting[rid]
        self.inside += 1
        self._empty.clear()
        return True

    def leave(self) -> None:
        """Go out again."""
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()

    def turn_away(self, chosen: Callable[[str], bool]) -> int:
        """Send the chosen waiters home.

        Returns:
            How many there were.
        """
        found = [waiter for rid, waiter in self._waiting.items() if chosen(rid) and not waiter.done()]
        for waiter in found:
            waiter.set_result(False)
        return len(found)

    def pause(self) -> None:
        """Close the door until `resume`. Idempotent."""
        self.paused = True

    def resume(self) -> None:
        """Open the door, unless a change of weights still holds it. Idempotent."""
        self.paused = False
        self._let_in()

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Close the door, wait until nobody is inside, and keep it so within."""
        self._writers += 1
        try:
            async with self._writing:
                await self._empty.wait()
                yield
        finally:
            self._writers -= 1
            self._let_in()

    def _let_in(self) -> None:
        if self.closed:
            return
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(True)
