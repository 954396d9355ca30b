"""What a test waits for: a state of something faked, looked at again at every change.

Invariant: no clock decides anything; the only timeout is the one that fails the test.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Watched"]

WAIT_TIMEOUT_S = 10.0
"""How long `until` waits, in seconds, before it fails the test: many times what a local exchange takes."""


class Watched:
    """Tells whoever waits, and the listeners, that something changed."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Event] = set()

    def changed(self) -> None:
        """Wake whoever waits for a state, and tell the listeners."""
        for waiter in self._waiters:
            waiter.set()
        for listener in self.listeners:
            listener()

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float | None = WAIT_TIMEOUT_S) -> None:
        """Wait until `holds()`.

        Raises:
            AssertionError: when it does not within `timeout_s`; the message says what is there.
        """
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    event.clear()
                    await event.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s: {what}; {self!r}") from None
        finally:
            self._waiters.discard(event)
