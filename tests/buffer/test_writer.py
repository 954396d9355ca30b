"""The thread that writes: in order, together, and never in silence when it cannot."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_svc.buffer.journal.writer import JournalFailed, Writer


class Table:
    """A table of numbers, whose writer may be held, or fail at one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad: int | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()
        self.told: list[JournalFailed] = []
        self.commits = 0
        self.committing = threading.Event()
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER)")
        self.connection.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        self.commits += statement == "COMMIT"
        if statement == "COMMIT":
            self.committing.set()

    def write(self, numbers: list[int]) -> None:
        self.entered.set()
        assert self.go_on.wait(10)
        for number in numbers:
            if number == self.bad:
                raise sqlite3.OperationalError("database or disk is full")
            self.connection.execute("INSERT INTO numbers VALUES (?)", (number,))

    def rows(self) -> list[int]:
        """What another process would find."""
        connection = sqlite3.connect(self.path)
        connection.execute("BEGIN IMMEDIATE")  # waits for whoever is writing
        try:
            return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY rowid")]
        finally:
            connection.close()


@asynccontextmanager
async def writing(path: Path) -> AsyncIterator[tuple[Table, Writer[int]]]:
    """A writer over a table."""
    table = Table(path / "numbers.sqlite")
    writer: Writer[int] = Writer(table.connection, table.write, on_failure=table.told.append)
    try:
        yield table, writer
    finally:
        table.go_on.set()
        await writer.close()


async def test_a_flush_returns_when_everything_before_it_is_on_disk(tmp_path: Path) -> None:
    """In the order in which it was put."""
    async with writing(tmp_path) as (table, writer):
        for number in range(100):
            writer.put(number)
        await writer.flush()
        assert table.rows() == list(range(100))


async def test_what_is_queued_is_one_transaction(tmp_path: Path) -> None:
    """Whoever waits while a commit is under way shares the next one."""
    async with writing(tmp_path) as (table, writer):
        table.go_on.clear()
        writer.put(0)
        first = asyncio.ensure_future(writer.flush())
        await asyncio.to_thread(table.entered.wait, 10)
        others = []
        for number in range(1, 50):
            writer.put(number)
            others.append(asyncio.ensure_future(writer.flush()))
        await asyncio.sleep(0)
        assert not first.done()
        table.go_on.set()
        await asyncio.gather(first, *others)
        assert table.commits == 2
        assert table.rows() == list(range(50))


async def test_what_nobody_waits_for_is_written_soon(tmp_path: Path) -> None:
    """A note without a flush is durable all the same."""
    async with writing(tmp_path) as (table, writer):
        writer.put(1)
        assert await asyncio.to_thread(table.committing.wait, 10)
        assert table.rows() == [1]


async def test_a_failure_tears_nothing_and_is_told_once(tmp_path: Path) -> None:
    """Its transaction is rolled back, nothing is written after it, and every flush says why."""  # P23
    async with writing(tmp_path) as (table, writer):
        writer.put(0)
        await writer.flush()
        table.bad = 2
        for number in (1, 2, 3):
            writer.put(number)
        with pytest.raises(JournalFailed, match="disk is full"):
            await writer.flush()
        table.bad = None
        writer.put(4)
        with pytest.raises(JournalFailed, match="disk is full"):
            await writer.flush()
        with pytest.raises(JournalFailed, match="disk is full"):
            await writer.run(lambda _: None)
        assert table.rows() == [0]
        assert len(table.told) == 1


async def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    """Twice is once; nothing can be put after it, and who asks is told."""
    async with writing(tmp_path) as (table, writer):
        writer.put(1)
        await writer.close()
        await writer.close()
        assert table.rows() == [1]
        writer.put(2)
        with pytest.raises(JournalFailed, match="closed"):
            await writer.run(lambda _: None)


async def test_work_between_two_transactions_sees_what_was_put_before(tmp_path: Path) -> None:
    """Its result is handed over, and what it raises harms nobody else."""
    async with writing(tmp_path) as (_, writer):
        writer.put(1)
        assert await writer.run(lambda c: c.execute("SELECT count(*) FROM numbers").fetchone()[0]) == 1
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await writer.run(lambda c: c.execute("SELECT 1 FROM nowhere"))
        writer.put(2)
        await writer.flush()


async def test_a_waiter_that_leaves_takes_nothing_along(tmp_path: Path) -> None:
    """A cancelled flush leaves its note in the queue."""
    async with writing(tmp_path) as (table, writer):
        table.go_on.clear()
        writer.put(1)
        waiting = asyncio.ensure_future(writer.flush())
        await asyncio.to_thread(table.entered.wait, 10)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        table.go_on.set()
        await writer.flush()
        assert table.rows() == [1]
