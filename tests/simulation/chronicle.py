"""What happened in a history: kept cheaply, printed when asked for, hashed to compare two runs.

Invariant: an entry is a tuple of plain values; it is written out only when somebody reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

__all__ = ["Chronicle"]


class Chronicle:
    """Entries of (time, actor, what, details)."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str, str, tuple[Any, ...]]] = []

    def add(self, now: float, actor: str, what: str, *details: Any) -> None:
        """Keep an entry."""
        self.entries.append((now, actor, what, details))

    def lines(self) -> Iterator[str]:
        """Every entry, to be read."""
        for now, actor, what, details in self.entries:
            yield f"{now:10.4f}  {actor:<10} {what} {' '.join(map(str, details))}".rstrip()

    def digest(self) -> str:
        """Twenty hexadecimal digits that differ when anything in the history does."""
        told = hashlib.sha256()
        for now, actor, what, details in self.entries:
            told.update(f"{now!r} {actor} {what} {details}\n".encode())
        return told.hexdigest()[:20]
