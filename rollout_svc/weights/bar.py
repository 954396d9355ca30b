"""A line on a trainer's terminal while its weights are on their way.

Invariants:

- One line, written over at most ten times a second, and ended once.
- `line` is pure; what has no total has no percentage.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["Bar", "line", "make_bar"]

_EVERY_S: Final = 0.1
_WIDTH: Final = 24
"""Characters of the bar itself."""
_MIB: Final = 2**20


def line(label: str, done: int, total: int | None, buckets: int, seconds: float) -> str:
    """Say how far it is."""
    rate = f"{done / _MIB / seconds:.0f} MiB/s" if done and seconds > 0 else "-"
    told = f"{buckets} buckets, {seconds:.1f} s, {rate}"
    if total is None:
        return f"{label}: {done / _MIB:.1f} MiB, {told}"
    share = min(done / total, 1.0) if total else 1.0
    full = int(share * _WIDTH)
    return (
        f"{label}: {share:4.0%} |{'#' * full}{'.' * (_WIDTH - full)}| {done / _MIB:.1f}/{total / _MIB:.1f} MiB, {told}"
    )


class Bar:
    """The line of one update; see the module's invariants. Used from one thread at a time."""

    def __init__(
        self, stream: TextIO, label: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._label, self._total, self._clock = stream, label, total, clock
        self._done = self._buckets = self._columns = 0
        self._began = clock()
        self._next = self._began
        self._ended = False
        self._draw()

    def loaded(self, nbytes: int) -> None:
        """Every engine has another bucket."""
        self._done += nbytes
        self._buckets += 1
        if self._clock() >= self._next:
            self._draw()

    def close(self) -> None:
        """Leave the last word standing; idempotent."""
        if not self._ended:
            self._ended = True
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        now = self._clock()
        self._next = now + _EVERY_S
        text = line(self._label, self._done, self._total, self._buckets, now - self._began)
        self._stream.write("\r" + text.ljust(self._columns))
        self._stream.flush()
        self._columns = len(text)


def make_bar(label: str, total: int | None, *, wanted: bool | None) -> Bar | None:
    """Make one on standard error; None where it is not wanted, or, with `wanted` None, where nobody watches."""
    show = sys.stderr.isatty() if wanted is None else wanted
    return Bar(sys.stderr, label, total) if show else None
