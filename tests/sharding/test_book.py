"""The coordinator's book as a file: what it keeps, and which files it refuses."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.config import Config
from rollout_svc.errors import ConfigError, InUse
from rollout_svc.sharding.book import TABLES, Book, Change, Earlier, kept_book, open_book, read_book
from tests.sharding.stage import config_of


def config_at(folder: Path, synchronous: str = "normal") -> Config:
    """Settings of two shards with journals there."""
    made = config_of(buffer={"path": str(folder / "journal.db")}, journal={"synchronous": synchronous})
    return made.model_copy(update={"producer": made.producer.model_copy(update={"shards": 2})})


@pytest.mark.parametrize("synchronous", ["normal", "full"])
async def test_what_was_noted_is_there_in_the_next_life(tmp_path: Path, synchronous: str) -> None:
    """P31: debts and lent steps survive, what was paid or has ended does not; the order of shards is theirs."""
    config = config_at(tmp_path, synchronous)
    async with kept_book(config) as book:
        assert book.earlier == Earlier({}, {})
        await book.lend("a-2", 3)
        await book.lend("b-2", 4)
        await book.lend("c-2", 5)
        await book.owe("a-2", "ack", ["s0", "s1"])
        await book.owe("d-2", "give_back", ["s1"])
        book.paid("a-2", "s0")
        book.paid("never", "s0")
        book.ended("b-2")
    async with kept_book(config) as book:
        assert book.earlier == Earlier({"s1": {"a-2": "ack", "d-2": "give_back"}}, {"c-2": 5})
        book.ended("c-2")
        book.paid("a-2", "s1")
        book.paid("d-2", "s1")
    async with kept_book(config) as book:
        assert book.earlier == Earlier({}, {})


def copied(folder: Path) -> Path:
    """Copy a book as a kill would leave it now."""
    (copy := folder / "copy").mkdir()
    for path in folder.glob("journal.db.coordinator*"):
        (copy / path.name).write_bytes(path.read_bytes())
    return copy / "journal.db.coordinator"


async def test_a_note_is_there_once_it_was_answered(tmp_path: Path) -> None:
    """P31: nothing is written by an orderly end: a copy of the files, as a kill leaves them, has it."""
    async with kept_book(config_at(tmp_path)) as book:
        await book.owe("a-2", "ack", ["s1"])
        copy = copied(tmp_path)
    connection, earlier = open_book(copy, 2)
    connection.close()
    assert earlier.owed == {"s1": {"a-2": "ack"}}


async def test_without_a_journal_nothing_is_kept() -> None:
    """No path, no file: a debt is forgotten with its coordinator."""
    async with kept_book(config_of(buffer={})) as book:
        await book.owe("a-2", "ack", ["s1"])
        await book.lend("b-2", 1)
    async with kept_book(config_of(buffer={})) as book:
        assert book.earlier == Earlier({}, {})


async def test_one_coordinator_has_it(tmp_path: Path) -> None:
    """P35: a second one is told that it is in use, which may pass."""
    async with kept_book(config_at(tmp_path)):
        with pytest.raises(InUse, match=r"buffer\.path: .*journal\.db\.coordinator is in use by another process"):
            await asyncio.to_thread(open_book, tmp_path / "journal.db.coordinator", 2)


async def test_a_batch_that_is_owed_is_lent_no_more(tmp_path: Path) -> None:
    """P31: a kill between the two notes leaves nothing in the book once the debt is paid, and holds up no step."""
    config = config_at(tmp_path)
    connection, _ = open_book(tmp_path / "journal.db.coordinator", 2)
    connection.execute("INSERT INTO lent VALUES ('a-2', 3), ('b-2', 4)")
    connection.execute("INSERT INTO owed VALUES ('a-2', 's1', 'ack')")
    connection.close()
    async with kept_book(config) as book:
        book.paid("a-2", "s1")
    async with kept_book(config) as book:
        assert book.earlier == Earlier({}, {"b-2": 4})


class Kept:
    """Notes as they were put, one by one."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def put(self, note: Change) -> None:
        """Keep it."""
        self.changes.append(note)

    async def flush(self) -> None:
        """Nothing waits for it."""


async def test_what_shards_owe_is_noted_of_all_of_them_or_of_none() -> None:
    """P31: whichever notes a kill lets through, no shard's part of a batch that others owe is forgotten."""
    notes = Kept()
    book = Book(notes)
    await book.lend("a-3", 7)
    await book.owe("a-3", "ack", ["s0", "s1", "s2"])
    for number in range(len(notes.changes) + 1):
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            database.executescript(TABLES)
            for change in notes.changes[:number]:
                database.execute(change.statement, change.values)
            earlier = read_book(database, {"s0", "s1", "s2"})
        assert list(earlier.owed) in ([], ["s0", "s1", "s2"])
        assert number == 0 or earlier.owed or earlier.lent == {"a-3": 7}


class Slow:
    """A value that the disk takes its time for."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def __conform__(self, _: object) -> str:
        """Say it as SQLite has it."""
        self.done.wait(30)
        return "x-2"


async def test_a_disk_that_hangs_holds_up_no_end(tmp_path: Path) -> None:
    """P8: whoever ends has ended in time; what the disk has not taken by then is as after a kill."""
    slow: Any = Slow()
    try:
        async with asyncio.timeout(10), kept_book(config_at(tmp_path), close_s=0.1) as book:
            lending = asyncio.ensure_future(book.lend(slow, 1))
            await asyncio.sleep(0)
            lending.cancel()
    finally:
        slow.done.set()


def _foreign(path: Path) -> None:
    path.write_text("some notes of somebody's")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE t (a)")
        made.commit()


def _other_number(path: Path) -> None:
    open_book(path, 3)[0].close()


def _cut(path: Path) -> None:
    open_book(path, 2)[0].close()
    path.write_bytes(path.read_bytes()[:5000])


def _overwritten(path: Path) -> None:
    connection, _ = open_book(path, 2)
    connection.execute("INSERT INTO owed VALUES ('a-2', 's1', 'ack')")
    connection.close()
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = b"\xff" * (len(data) - 4096 * 2)
    path.write_bytes(data)


def _unknown_debt(path: Path) -> None:
    connection, _ = open_book(path, 2)
    connection.execute("INSERT INTO owed VALUES ('a-2', 's1', 'money')")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_foreign, "is not a coordinator's book"),
        (_empty, "is not a coordinator's book"),
        (_other_database, "is not a coordinator's book: it is a database of something else"),
        (_other_number, "belongs to 3 shards, and these are 2"),
        (_cut, "is half of a coordinator's book"),
        (_overwritten, "is damaged"),
        (_unknown_debt, "is damaged: shard 's1' cannot owe 'money'"),
    ],
)
def test_a_file_that_is_no_book_is_refused(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    """P35: another's file, half of one, or a damaged one is never ignored, nor changed by a byte."""
    path = tmp_path / "journal.db.coordinator"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as told:
        open_book(path, 2)
    assert str(told.value).startswith(f"buffer.path: {path} {words}")
    assert not isinstance(told.value, InUse)
    assert path.read_bytes() == before
