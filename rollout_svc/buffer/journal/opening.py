"""Opening a file of ours, a journal above all, or making it.

Invariants:

- A file that is refused is not changed by a byte: it is looked at without SQLite first, then read as it lies there, and
  opened for writing only when it was found to be ours and of these settings.
- A file of ours appears under its name with its tables and its fingerprint in it, or not at all, also where several
  processes make it at once.
- One process at a time: the second is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from rollout_svc.buffer.journal.fingerprint import Fingerprint, differences
from rollout_svc.buffer.journal.schema import APPLICATION, PRAGMAS, SNAPSHOT, VERSION, create_tables
from rollout_svc.buffer.syncing import sync
from rollout_svc.errors import ConfigError, InUse

__all__ = ["HEADER_BYTES", "MAGIC", "Kind", "open_file", "open_journal", "refusal"]

_WHERE: Final = "buffer.path"
MAGIC: Final = b"SQLite format 3\x00"
HEADER_BYTES: Final = 100
_TOKEN_BYTES: Final = 4  # of a name that nobody else gives
_LARGEST_PAGE: Final = 65536  # bytes; written as 1, for it does not fit


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        name: what it is called.
        application: `application_id` of the database.
        version: `user_version`.
        others: what is said of files with another `application_id`.
    """

    name: str
    application: int
    version: int
    others: Mapping[int, str]


_JOURNAL: Final = Kind(
    "journal",
    APPLICATION,
    VERSION,
    {SNAPSHOT: "is a snapshot: name a file that is not there yet, and give the snapshot to --restore"},
)


def open_journal(path: Path, fingerprint: Fingerprint, synchronous: str = "normal") -> sqlite3.Connection:
    """Open a journal for writing, in autocommit mode; makes it where there is none. Blocks.

    Args:
        path: of the file.
        fingerprint: what it must belong to.
        synchronous: `normal`, or `full`: see `schema`.

    Raises:
        InUse: another process has it.
        ConfigError: at `buffer.path`: why it cannot be used, or what differs; the file is as it was.
    """

    def create(connection: sqlite3.Connection) -> None:
        create_tables(connection, orjson.dumps(fingerprint), time.time())

    return open_file(path, _JOURNAL, create, lambda connection: _strangeness(connection, fingerprint), synchronous)


def open_file(
    path: Path,
    kind: Kind,
    create: Callable[[sqlite3.Connection], None],
    strange: Callable[[sqlite3.Connection], str | None],
    synchronous: str,
) -> sqlite3.Connection:
    """Open a file of one kind for writing; see `open_journal`.

    Args:
        path: of the file.
        kind: of it.
        create: makes its tables in a new database.
        strange: says what is wrong with what is in it, which it may only read; None: nothing.
        synchronous: see `open_journal`.
    """
    try:
        if not path.exists():
            _create(path, create)
        problem = _problem_of(path, kind) or _read(path, strange)
        if problem is not None:
            raise refusal(path, problem)
        return _connect(path, synchronous)
    except OSError as error:
        raise refusal(path, f"cannot be used: {error.strerror or error}") from None
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise InUse.at(_WHERE, f"{path} is in use by another process") from None
        raise refusal(path, _told(error)) from None


def refusal(path: Path, message: str) -> ConfigError:
    """The error for a file that cannot be used."""
    return ConfigError.at(_WHERE, f"{path} {message}")


def _create(path: Path, create: Callable[[sqlite3.Connection], None]) -> None:
    """Make an empty one under another name, of nobody else's, then give it its own."""
    if not path.parent.is_dir():
        raise refusal(path, f"cannot be made: there is no folder {path.parent}")
    new = path.with_name(f"{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.new")
    try:
        connection = sqlite3.connect(new, isolation_level=None)
        try:
            create(connection)
        finally:
            connection.close()
        sync(new)
        os.link(new, path)
    except (OSError, sqlite3.Error):
        if not path.exists():
            raise
        # Another was faster, and has swept: what it made is looked at like any other.
    finally:
        _sweep(path, new)
    sync(path.parent)


def _sweep(path: Path, own: Path) -> None:
    """Remove what was to become this file, once it is there: those of starts that were killed, and of slower ones."""
    own.unlink(missing_ok=True)
    if path.exists():
        other = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{{2 * _TOKEN_BYTES}}})?\.new")
        for left in [found for found in path.parent.iterdir() if other.fullmatch(found.name)]:
            left.unlink(missing_ok=True)


def _problem_of(path: Path, kind: Kind) -> str | None:
    """Look at the first bytes: another kind of file, another version, or half of one."""
    if not path.is_file():
        return "is no file"
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if not header.startswith(MAGIC[: len(header)]) or not header:
        return f"is not a {kind.name}"
    if len(header) < HEADER_BYTES:
        return f"is half of a {kind.name}: it ends within its header"
    version, application = struct.unpack_from(">I4xI", header, 60)
    if application != kind.application:
        return kind.others.get(application, f"is not a {kind.name}: it is a database of something else")
    if version != kind.version:
        return f"is a {kind.name} of version {version}; this service writes version {kind.version}"
    page, pages = struct.unpack_from(">H", header, 16)[0], struct.unpack_from(">I", header, 28)[0]
    size, whole = path.stat().st_size, (_LARGEST_PAGE if page == 1 else page) * pages
    log = path.with_name(f"{path.name}-wal")
    if size < whole and not (log.exists() and log.stat().st_size):  # with a log, SQLite makes good what is missing
        return f"is half of a {kind.name}: it has {size} of {whole} bytes"
    return None


def _read(path: Path, strange: Callable[[sqlite3.Connection], str | None]) -> str | None:
    """Read a file as it lies there: no lock, no log, no change."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
    try:
        return strange(connection)
    finally:
        connection.close()


def _strangeness(connection: sqlite3.Connection, fingerprint: Fingerprint) -> str | None:
    """Say what differs between what a journal belongs to, and what it should."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    if row is None:
        return "is damaged: it does not say what it belongs to"
    found = differences(orjson.loads(row[0]), fingerprint)
    return f"was written under other settings: {'; '.join(found)}" if found else None


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
    if isinstance(error, sqlite3.OperationalError):
        return f"cannot be used: {error}"
    return f"is damaged: {error}"
