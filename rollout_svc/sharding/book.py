"""What a coordinator has promised and cannot read in the shards, in a file of its own.

Invariants:

- An ack that was accepted while a shard with a part of the batch is lost is in the file before anybody is told so, and
  until that shard has consumed its part; likewise what a lost shard is to give back.
- The batch of a step is in the file before a shard leases anything for it, and until it has ended.
- What shards owe of one batch is noted of all of them or of none.
- What is noted late, or twice, is harmless: a debt that was paid is paid again for nothing, a batch that has ended is
  found in no shard.
- Another kind of file, one of another number of shards, and one that is damaged are refused, and left as they are.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from rollout_svc.buffer.journal.layout import BOOK, BOOK_ENDING, refuse_other_layout
from rollout_svc.buffer.journal.opening import Kind, open_file, refusal
from rollout_svc.buffer.journal.writer import JournalFailed, Writer
from rollout_svc.config import Config
from rollout_svc.tasks import wait_until

__all__ = ["CLOSE_S", "TABLES", "Book", "Change", "Debt", "Earlier", "Notes", "kept_book", "open_book", "read_book"]

Debt = Literal["ack", "give_back"]
"""What a shard has still to be told of a batch."""
_KIND: Final = Kind("coordinator's book", BOOK, 1, {})
CLOSE_S: Final = 5.0
"""Seconds that the end may take: many times what a disk needs for the last notes."""
TABLES: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE owed (batch_id TEXT, shard TEXT, what TEXT NOT NULL, PRIMARY KEY (batch_id, shard)) WITHOUT ROWID;
CREATE TABLE lent (batch_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
"""


class Earlier(NamedTuple):
    """What the coordinator before has left.

    Attributes:
        owed: by shard and batch, what that shard has still to be told.
        lent: by batch, the step it was lent for.
    """

    owed: dict[str, dict[str, Debt]]
    lent: dict[str, int]


class Change(NamedTuple):
    """One change of the file: a statement and what is put into it."""

    statement: str
    values: tuple[str | int, ...]


class Notes(Protocol):
    """Where changes go; `Writer` is one."""

    def put(self, note: Change) -> None:
        """Have it written soon."""

    async def flush(self) -> None:
        """Return once everything put so far is durable; raises JournalFailed."""


class Book:
    """Takes notes, in the loop.

    Attributes:
        earlier: what was found in it.
        on_failure: is told once that nothing can be noted any more.
    """

    def __init__(self, notes: Notes | None = None, earlier: Earlier | None = None) -> None:
        """Make it; without `notes` nothing is kept."""
        self.earlier = earlier or Earlier({}, {})
        self.on_failure: Callable[[JournalFailed], None] = lambda _: None
        self._notes = notes
        self._owed = {(batch_id, shard) for shard, owed in self.earlier.owed.items() for batch_id in owed}
        self._lent = set(self.earlier.lent)
        for batch_id in {batch_id for batch_id, _ in self._owed} & self._lent:
            self.ended(batch_id)  # a kill came between the two notes of `owe`

    def __repr__(self) -> str:
        return f"<Book owed={len(self._owed)} lent={len(self._lent)}>"

    async def lend(self, batch_id: str, step: int) -> None:
        """A batch is to be lent; returns once that is durable."""
        self._lent.add(batch_id)
        self._put("INSERT OR REPLACE INTO lent VALUES (?, ?)", batch_id, step)
        await self._flush()

    def ended(self, batch_id: str) -> None:
        """It is lent no more."""
        if batch_id in self._lent:
            self._lent.discard(batch_id)
            self._put("DELETE FROM lent WHERE batch_id = ?", batch_id)

    async def owe(self, batch_id: str, what: Debt, shards: Iterable[str]) -> None:
        """These shards, one at least, could not be told; returns once that is durable."""
        owing = [(batch_id, shard, what) for shard in shards]
        self._owed |= {(batch_id, shard) for _, shard, _ in owing}
        rows = ", ".join(["(?, ?, ?)"] * len(owing))
        # One note: of a batch that some owe the others' parts are looked for no more.
        self._put(f"INSERT OR REPLACE INTO owed VALUES {rows}", *chain.from_iterable(owing))  # noqa: S608 - marks alone
        self.ended(batch_id)
        await self._flush()

    def paid(self, batch_id: str, shard: str) -> None:
        """One of them was told."""
        if (batch_id, shard) in self._owed:
            self._owed.discard((batch_id, shard))
            self._put("DELETE FROM owed WHERE batch_id = ? AND shard = ?", batch_id, shard)

    def _put(self, statement: str, *values: str | int) -> None:
        if self._notes is not None:
            self._notes.put(Change(statement, values))

    async def _flush(self) -> None:
        if self._notes is not None:
            await self._notes.flush()


@asynccontextmanager
async def kept_book(config: Config, *, close_s: float = CLOSE_S) -> AsyncIterator[Book]:
    """Open the book beside the shards' journals; without a `buffer.path` it keeps nothing.

    Args:
        config: the settings of the whole.
        close_s: seconds for what is left to be written at the end.

    Raises:
        InUse: another coordinator has it.
        ConfigError: at `buffer.path`: it cannot be used, or what lies there is of another number of shards.
    """
    if config.buffer.path is None:
        yield Book()
        return
    path, shards, synchronous = config.buffer.path, config.producer.shards, config.journal.synchronous
    await asyncio.to_thread(refuse_other_layout, Path(path), shards)
    connection, earlier = await asyncio.to_thread(open_book, Path(path + BOOK_ENDING), shards, synchronous)

    def write(changes: list[Change]) -> None:
        for change in changes:
            connection.execute(change.statement, change.values)

    def failed(error: JournalFailed) -> None:
        book.on_failure(error)  # whoever is told now, not when the thread began

    writer = Writer(connection, write, on_failure=failed)
    book = Book(writer, earlier)
    try:
        yield book
    finally:
        closing = asyncio.ensure_future(writer.close())
        await wait_until((closing,), asyncio.get_running_loop().time() + close_s)
        closing.cancel()


def open_book(path: Path, shards: int, synchronous: str = "normal") -> tuple[sqlite3.Connection, Earlier]:
    """Open the file, or make it, and read what is there. Blocks.

    Args:
        path: of the file.
        shards: how many the coordinator has.
        synchronous: as of a journal.

    Raises:
        InUse, ConfigError: see `kept_book`; the file is as it was.
    """

    def create(connection: sqlite3.Connection) -> None:
        connection.executescript(f"BEGIN;{TABLES}COMMIT;")
        connection.execute("INSERT INTO meta VALUES ('shards', ?), ('created', ?)", (shards, time.time()))
        connection.execute(f"PRAGMA application_id={_KIND.application}")
        connection.execute(f"PRAGMA user_version={_KIND.version}")
        connection.commit()

    def strange(connection: sqlite3.Connection) -> str | None:
        row = connection.execute("SELECT value FROM meta WHERE key = 'shards'").fetchone()
        if row is None:
            return "is damaged: it does not say how many shards it belongs to"
        return None if row[0] == shards else f"belongs to {row[0]} shards, and these are {shards}"

    connection = open_file(path, _KIND, create, strange, synchronous)
    try:
        return connection, read_book(connection, {f"s{index}" for index in range(shards)})
    except (sqlite3.Error, ValueError) as error:
        connection.close()
        raise refusal(path, f"is damaged: {error}") from error


def read_book(connection: sqlite3.Connection, shards: set[str]) -> Earlier:
    """Read everything; raises ValueError where it makes no sense."""
    found = [row[0] for row in connection.execute("PRAGMA quick_check")]
    if found != ["ok"]:
        raise ValueError(found[0])
    owed: dict[str, dict[str, Debt]] = {}
    for batch_id, shard, what in connection.execute("SELECT batch_id, shard, what FROM owed"):
        if what not in ("ack", "give_back") or shard not in shards:
            raise ValueError(f"shard {shard!r} cannot owe {what!r}")
        owed.setdefault(shard, {})[batch_id] = what
    return Earlier(owed, dict(connection.execute("SELECT batch_id, step FROM lent")))
