"""One bell for everything that changes in a test: whoever waits looks again when it rings.

- Nobody polls: a wait ends when the state it waits for is there, or fails the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["WAIT_S", "Bell"]

WAIT_S = 15.0
"""How long a wait lasts, in seconds, before it fails the test: many times what anything here takes."""


class Bell:
    """Rings when something changed."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def ring(self, *_: object) -> None:
        """Let everyone look again; takes any arguments, so that it serves as a listener."""
        for waiter in self._waiters:
            waiter.set()

    async def until(self, holds: Callable[[], bool], what: str = "", timeout_s: float = WAIT_S) -> None:
        """Wait until `holds()`.

        Raises:
            AssertionError: when it does not within `timeout_s`.
        """
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    event.clear()
                    await event.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s: {what or holds}") from None
        finally:
            self._waiters.discard(event)
