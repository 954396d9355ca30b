"""Opening a journal's file, or making it.

Invariants:

- A file that is refused is not changed by a byte: it is looked at without SQLite first, then read as it lies there, and
  opened for writing only when it was found to be ours and of these settings.
- A file of ours appears under its name with its tables and its fingerprint in it, or not at all.
- One process at a time: the second is refused.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import time
from pathlib import Path
from typing import Final

import orjson

from rollout_svc.buffer.journal.fingerprint import Fingerprint, differences
from rollout_svc.buffer.journal.schema import APPLICATION, PRAGMAS, SNAPSHOT, VERSION, create_tables
from rollout_svc.buffer.syncing import sync
from rollout_svc.errors import ConfigError

__all__ = ["open_journal", "refusal"]

_WHERE: Final = "buffer.path"
_MAGIC: Final = b"SQLite format 3\x00"
_HEADER_BYTES: Final = 100
_LARGEST_PAGE: Final = 65536  # bytes; written as 1, for it does not fit


def open_journal(path: Path, fingerprint: Fingerprint, synchronous: str = "normal") -> sqlite3.Connection:
    """Open a journal for writing, in autocommit mode; makes it where there is none. Blocks.

    Args:
        path: of the file.
        fingerprint: what it must belong to.
        synchronous: `normal`, or `full`: see `schema`.

    Raises:
        ConfigError: at `buffer.path`: why it cannot be used, or what differs; the file is as it was.
    """
    try:
        if not path.exists():
            _create(path, fingerprint)
        problem = _problem_of(path)
        if problem is not None:
            raise refusal(path, problem)
        _compare(path, fingerprint)
        return _connect(path, synchronous)
    except OSError as error:
        raise refusal(path, f"cannot be used: {error.strerror or error}") from None
    except sqlite3.Error as error:
        raise refusal(path, _told(error)) from None


def refusal(path: Path, message: str) -> ConfigError:
    """The error for a file that cannot be used."""
    return ConfigError.at(_WHERE, f"{path} {message}")


def _create(path: Path, fingerprint: Fingerprint) -> None:
    """Make an empty journal under another name, then give it its own."""
    if not path.parent.is_dir():
        raise refusal(path, f"cannot be made: there is no folder {path.parent}")
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    connection = sqlite3.connect(new, isolation_level=None)
    try:
        create_tables(connection, orjson.dumps(fingerprint), time.time())
    finally:
        connection.close()
    sync(new)
    with contextlib.suppress(FileExistsError):  # another service was faster: what it made is looked at like any other
        os.link(new, path)
    new.unlink()
    sync(path.parent)


def _problem_of(path: Path) -> str | None:
    """Look at the first bytes: another kind of file, another version, or half of one."""
    if not path.is_file():
        return "is no file"
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header.startswith(_MAGIC[: len(header)]) or not header:
        return "is not a journal"
    if len(header) < _HEADER_BYTES:
        return "is half of a journal: it ends within its header"
    version, application = struct.unpack_from(">I4xI", header, 60)
    if application == SNAPSHOT:
        return "is a snapshot: name a file that is not there yet, and give the snapshot to --restore"
    if application != APPLICATION:
        return "is not a journal: it is a database of something else"
    if version != VERSION:
        return f"is a journal of version {version}; this service writes version {VERSION}"
    page, pages = struct.unpack_from(">H", header, 16)[0], struct.unpack_from(">I", header, 28)[0]
    size, whole = path.stat().st_size, (_LARGEST_PAGE if page == 1 else page) * pages
    log = path.with_name(f"{path.name}-wal")
    if size < whole and not (log.exists() and log.stat().st_size):  # with a log, SQLite makes good what is missing
        return f"is half of a journal: it has {size} of {whole} bytes"
    return None


def _compare(path: Path, fingerprint: Fingerprint) -> None:
    """Read what it belongs to from the file as it lies there: no lock, no log, no change."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    finally:
        connection.close()
    if row is None:
        raise refusal(path, "is damaged: it does not say what it belongs to")
    found = differences(orjson.loads(row[0]), fingerprint)
    if found:
        raise refusal(path, f"was written under other settings: {'; '.join(found)}")


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise refusal(path, "cannot be written: it, or its folder, is read-only")
    connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
    try:
        for pragma in (*PRAGMAS, f"PRAGMA synchronous={synchronous}"):
            connection.execute(pragma)
        connection.execute("BEGIN IMMEDIATE")  # takes the lock for good
        connection.execute("UPDATE meta SET value = value WHERE key = 'created'")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _told(error: sqlite3.Error) -> str:
    if "locked" in str(error):
        return "is in use by another process"
    if isinstance(error, sqlite3.OperationalError):
        return f"cannot be used: {error}"
    return f"is damaged: {error}"
