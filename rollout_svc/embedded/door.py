"""The door before the scheduler: where requests wait during a pause or a change of weights.

Invariants:
- While the door is closed nobody enters; those who wait enter in the order they came once it opens.
- `exclusively` begins when nobody is inside, or those inside are frozen; nobody enters until it ends.
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
        self.frozen = False
        self.inside = 0
        self._writers = 0
        self._writing = asyncio.Lock()
        self._empty = asyncio.Event()
        self._quiet = asyncio.Event()
        self._note()
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
        self._note()
        return True

    def leave(self) -> None:
        """Go out again."""
        self.inside -= 1
        self._note()

    def turn_away(self, chosen: Callable[[str], bool]) -> int:
        """Send the chosen waiters home.

        Returns:
            How many there were.
        """
        found = [waiter for rid, waiter in self._waiting.items() if chosen(rid) and not waiter.done()]
        for waiter in found:
            waiter.set_result(False)
        return len(found)

    def pause(self, *, frozen: bool = False) -> None:
        """Close the door until `resume`. The last of several pauses says whether those inside are frozen."""
        self.paused, self.frozen = True, frozen
        self._note()

    def resume(self) -> None:
        """Open the door, unless a change of weights still holds it. Idempotent."""
        self.paused = self.frozen = False
        self._note()
        self._let_in()

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Close the door, and wait until nobody is inside or those inside are frozen.

        What is frozen may be let go by a `resume` before this ends: what must find it frozen is asked for without an
        await in between.
        """
        self._writers += 1
        try:
            async with self._writing:
                while not self._quiet.is_set():  # a freeze may be over before its news arrives
                    await self._quiet.wait()
                yield
        finally:
            self._writers -= 1
            self._let_in()

    def _note(self) -> None:
        """Set the events to what holds now."""
        for event, holds in ((self._empty, self.inside == 0), (self._quiet, self.frozen or self.inside == 0)):
            if holds:
                event.set()
            else:
                event.clear()

    def _let_in(self) -> None:
        if self.closed:
            return
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(True)
