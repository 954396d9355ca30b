"""Journals for tests: one that writes where it is told to, with no thread and no disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from rollout_svc.buffer.journal import Journal, notes
from rollout_svc.buffer.journal.reading import read_journal
from rollout_svc.buffer.journal.schema import create_tables
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.journal.writer import Writer
from rollout_svc.buffer.recovered import Recovered

__all__ = ["InlineJournal", "memory_database"]


def memory_database() -> sqlite3.Connection:
    """Make an empty journal in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(connection, b"{}", 0.0)
    return connection


R = TypeVar("R")


class _Inline(Writer[notes.Note]):
    """Writes each note at once, in a transaction of its own."""

    def __init__(self, connection: sqlite3.Connection, write: Callable[[notes.Note], None]) -> None:
        self.failure = None
        self.after: Callable[[notes.Note], None] = lambda _: None
        self._connection = connection
        self._write_one = write

    def put(self, note: notes.Note) -> None:
        self._connection.execute("BEGIN")
        self._write_one(note)
        self._connection.execute("COMMIT")
        self.after(note)

    async def flush(self) -> None:
        return None

    async def run(self, do: Callable[[sqlite3.Connection], R], within_s: float = 0.0) -> R:
        return do(self._connection)

    async def close(self) -> None:
        return None


class InlineJournal(Journal):
    """A journal over an open database; `inline.after` is called after each note."""

    def __init__(
        self, connection: sqlite3.Connection, *, keep_steps: int = 64, wall: Callable[[], float] = lambda: 1000.0
    ) -> None:
        super().__init__(connection, read_journal(connection), keep_steps=keep_steps, wall=wall)
        self.connection = connection
        self._writer = self.inline = _Inline(connection, Tables(connection, keep_steps).write)

    def found(self) -> Recovered:
        """What the next life would find now."""
        return read_journal(self.connection)
