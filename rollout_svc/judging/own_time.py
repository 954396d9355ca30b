"""The time that a judger which asks others takes by itself.

Invariant: it runs while none of the others is asked, and only then: their queueing and their work are theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["OwnTime"]


class OwnTime:
    """Runs from when it is made; calls `on_end` once it is used up."""

    __slots__ = ("_asking", "_left_s", "_on_end", "_over", "_since", "_timer")

    def __init__(self, seconds: float, on_end: Callable[[], None]) -> None:
        self._asking = 0
        self._over = False
        self._left_s = seconds
        self._on_end = on_end
        self._run()

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self._left_s, self._on_end)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Stand still while another is asked; several may be at once."""
        if not self._asking:
            self._timer.cancel()
            self._left_s = max(0.0, self._left_s - (asyncio.get_running_loop().time() - self._since))
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking and not self._over:
                self._run()

    def cancel(self) -> None:
        """Stop for good."""
        self._over = True
        self._timer.cancel()
