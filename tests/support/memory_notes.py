"""A coordinator's book in memory: what was flushed outlives its coordinator, what was not does not."""

from __future__ import annotations

import sqlite3

from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.sharding.book import TABLES, Book, Change, read_book

__all__ = ["MemoryNotes"]


class MemoryNotes:
    """Takes notes at once, into a database that is nowhere.

    Attributes:
        broken: nothing can be written any more.
    """

    def __init__(self, shards: int = 2) -> None:
        self.broken = False
        self._shards = {f"s{index}" for index in range(shards)}
        self._waiting: list[Change] = []
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.executescript(TABLES)

    def put(self, note: Change) -> None:
        self._waiting.append(note)

    async def flush(self) -> None:
        if self.broken:
            raise JournalFailed("the disk is on holiday")
        for change in self._waiting:
            self._database.execute(change.statement, change.values)
        self._waiting.clear()

    def book(self) -> Book:
        """A book for the next coordinator, with what is there."""
        self._waiting.clear()
        return Book(self, read_book(self._database, self._shards))

    @property
    def rows(self) -> int:
        """How much is in it."""
        earlier = read_book(self._database, self._shards)
        return len(earlier.lent) + sum(map(len, earlier.owed.values()))
