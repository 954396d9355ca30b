"""Snapshots: a journal copied whole into one file, and such a file made a journal again.

Invariants:

- A file at its final name is whole: it is written under another name in the same folder, synced, and renamed.
- What is not a snapshot of ours is never replaced, and a snapshot is only read, never changed.
- A copy is of one moment, that of its end: what is written while it is made is in it, and nothing is torn.
- Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "APPLICATION",
    "NotASnapshotError",
    "Snapshot",
    "beside",
    "check_whole",
    "read_snapshot",
    "write_snapshot",
]

APPLICATION: Final = 0x726F6C73
"""`application_id` of a snapshot: "rols"; a journal has another, so that neither is taken for the other."""
_PAGES: Final = 1024  # copied between two writes: 4 MiB, some milliseconds
_BUSY_S: Final = 5.0  # how long to wait for whoever holds a lock
_MARK: Final = "CREATE TABLE snapshot (step INTEGER NOT NULL, made_at REAL NOT NULL)"


class NotASnapshotError(Exception):
    """Raised when a file is no snapshot, or is not all of one; says which in one line."""


class Snapshot(NamedTuple):
    """What a snapshot holds.

    Attributes:
        step: trainer steps done when it was made.
        bytes: of the file.
        groups: that are admitted and not settled.
        samples: of those groups.
    """

    step: int
    bytes: int
    groups: int
    samples: int


def write_snapshot(journal: sqlite3.Connection, target: Path, step: int, between: Callable[[], None]) -> Snapshot:
    """Copy a journal; runs in the thread that writes to it, and lets it write on.

    Args:
        journal: the only connection there is: what is written to it between two pieces of the copy is in the copy.
        target: where the snapshot goes; a snapshot that is there already is replaced.
        step: trainer steps done.
        between: called between two pieces, outside of a transaction; what it raises ends the copy.

    Raises:
        FileExistsError: something else is at `target`.
        OSError: `target` cannot be written.
        sqlite3.Error: likewise: the disk is full.
    """
    if target.exists() or target.is_symlink():
        try:
            read_snapshot(target)
        except NotASnapshotError as error:
            raise FileExistsError(str(error)) from error
    with beside(target) as made, closing(sqlite3.connect(made, isolation_level=None)) as copy:
        journal.backup(copy, pages=_PAGES, progress=lambda *_: between())
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, that any machine can read from anywhere
        copy.execute("BEGIN")
        copy.execute("DROP TABLE IF EXISTS snapshot")
        copy.execute(_MARK)
        copy.execute("INSERT INTO snapshot VALUES (?, ?)", (step, time.time()))
        copy.execute(f"PRAGMA application_id={APPLICATION}")
        copy.execute("COMMIT")
        counts = _counts(copy)
        copy.close()
    return Snapshot(step, target.stat().st_size, *counts)


def read_snapshot(path: Path) -> Snapshot:
    """Say what a snapshot holds; reads its marks only (`check_whole` reads all of it).

    Raises:
        NotASnapshotError: it is none.
    """
    if not path.is_file():
        raise NotASnapshotError(f"{path} is not a file")
    try:
        with closing(_reading(path)) as found:
            step = found.execute("SELECT step FROM snapshot").fetchone()
            counts = _counts(found)
    except sqlite3.Error as error:
        raise NotASnapshotError(f"{path} is not a snapshot: {error}") from error
    if step is None:
        raise NotASnapshotError(f"{path} is not a snapshot: it has no step")
    return Snapshot(int(step[0]), path.stat().st_size, *counts)


def check_whole(path: Path) -> None:
    """Read all of a snapshot.

    Raises:
        NotASnapshotError: a part of it is missing or damaged.
    """
    try:
        with closing(_reading(path)) as found:
            pages, size = (int(found.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
            verdict = found.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise NotASnapshotError(f"{path} is damaged: {error}") from error
    if path.stat().st_size != pages * size:
        raise NotASnapshotError(f"{path} is not whole: it has {path.stat().st_size} of {pages * size} bytes")
    if verdict != "ok":
        raise NotASnapshotError(f"{path} is damaged: {' '.join(str(verdict).split())}")


def _reading(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_S)


def _counts(database: sqlite3.Connection) -> tuple[int, int]:
    def count(table: str) -> int:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608 - our own names

    return count("groups"), count("samples")


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Give a name in the folder of `target`; what was written there is `target` afterwards, or is gone."""
    made = target.with_name(f".{target.name}.partial")
    _forget(made)  # of a process that was killed
    try:
        yield made
        _sync(made)
        made.replace(target)
        _sync(target.parent)
    finally:
        _forget(made)


def _forget(made: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            made.with_name(made.name + suffix).unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
