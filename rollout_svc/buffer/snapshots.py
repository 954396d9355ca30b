"""Snapshots: a journal copied whole into one file, and such a file made a journal again.

Invariants:

- A file at its final name is whole: it is written under another name in the same folder, synced, and renamed.
- What is not a snapshot of ours is never replaced, and a snapshot is only read, never changed.
- A copy is of one moment, that of its end: what is written while it is made is in it, and nothing is torn.
- Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from rollout_svc.buffer.journal import schema
from rollout_svc.buffer.journal.fingerprint import Fingerprint, differences
from rollout_svc.buffer.journal.notes import Unleased
from rollout_svc.buffer.journal.records import decode_sample
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.syncing import sync

__all__ = [
    "NotASnapshotError",
    "Restored",
    "Snapshot",
    "WrongStepError",
    "beside",
    "check_whole",
    "read_snapshot",
    "restore",
    "write_snapshot",
]

_PAGES: Final = 1024  # copied between two writes: 4 MiB, some milliseconds
_STALE: Final = ("-wal", "-shm", "-journal")  # what a database may leave beside itself
_MARK: Final = "CREATE TABLE snapshot (step INTEGER NOT NULL, made_at REAL NOT NULL)"


class NotASnapshotError(Exception):
    """Raised when a file is no snapshot, or is not all of one; says which in one line."""


class WrongStepError(Exception):
    """Raised when a step is to be restored that a snapshot does not reach; says which it does."""


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


class Restored(NamedTuple):
    """What became of a snapshot.

    Attributes:
        step: trainer steps done, from where it goes on.
        returned: groups that were consumed at that step or later: their prompts wait to be admitted again.
        freed: groups that were lent for that step or later: they are ready again.
        redone: samples with tokens of weights that were made after the step: they are begun again.
    """

    step: int
    returned: int
    freed: int
    redone: int


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
        copy.execute(f"PRAGMA application_id={schema.SNAPSHOT}")
        copy.execute("COMMIT")
        counts = _counts(copy)
    return Snapshot(step, target.stat().st_size, *counts)


def read_snapshot(path: Path) -> Snapshot:
    """Say what a snapshot holds; reads its marks only (`check_whole` reads all of it).

    Raises:
        NotASnapshotError: it is none, or one that this version cannot read.
    """
    if not path.is_file():
        raise NotASnapshotError(f"{path} is no file" if path.exists() else f"{path} is not there")
    try:
        with closing(_reading(path)) as found:
            application, version = (_pragma(found, name) for name in ("application_id", "user_version"))
            if application != schema.SNAPSHOT:
                raise NotASnapshotError(f"{path} is not a snapshot")
            if version != schema.VERSION:
                told = f"is a snapshot of version {version}; this service reads version {schema.VERSION}"
                raise NotASnapshotError(f"{path} {told}")
            step = found.execute("SELECT step FROM snapshot").fetchone()[0]
            return Snapshot(step, path.stat().st_size, *_counts(found))
    except sqlite3.Error as error:
        raise NotASnapshotError(f"{path} is not a snapshot, or not a whole one: {error}") from error


def check_whole(path: Path) -> None:
    """Read all of a snapshot.

    Raises:
        NotASnapshotError: a part of it is missing or damaged.
    """
    try:
        with closing(_reading(path)) as found:
            pages, size = (_pragma(found, name) for name in ("page_count", "page_size"))
            verdict = found.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise NotASnapshotError(f"{path} is damaged: {error}") from error
    if path.stat().st_size != pages * size:
        raise NotASnapshotError(f"{path} is not whole: it has {path.stat().st_size} of {pages * size} bytes")
    if verdict != "ok":
        raise NotASnapshotError(f"{path} is damaged: {' '.join(str(verdict).split())}")


def restore(snapshot: Path, journal: Path, fingerprint: Fingerprint, step: int | None = None) -> Restored:
    """Make a snapshot a journal.

    What was consumed at `step` or later is not in the weights that the trainer goes on from: its prompts wait to be
    admitted again, before all others, and it is in no total. What was lent for such a step is ready again. What was
    lent for an earlier step stays lent, until its ack or the end of its lease. Where the step is before the snapshot's,
    later weights are gone, and the trainer makes others of the same numbers: samples with tokens of those begin again.

    Args:
        snapshot: only read.
        journal: a file that is not there yet.
        fingerprint: of the settings that it is to belong to.
        step: trainer steps done; None: the snapshot's.

    Raises:
        FileExistsError: there is a journal already.
        NotASnapshotError: `snapshot` is none, or not all of one, or was written under other settings.
        WrongStepError: the is later than the snapshot, or its prompts were forgotten.
        OSError: the journal cannot be written.
        sqlite3.Error: likewise.
    """
    for name in (journal.name, *(journal.name + suffix for suffix in _STALE)):
        if (found := journal.with_name(name)).exists() or found.is_symlink():
            raise FileExistsError(str(found))
    made_at = read_snapshot(snapshot).step
    if step is not None and step > made_at:
        raise WrongStepError(f"{snapshot} was made at step {made_at}, and knows nothing of step {step}")
    check_whole(snapshot)
    with beside(journal) as made:
        shutil.copyfile(snapshot, made)
        with closing(sqlite3.connect(made, isolation_level=None)) as copy:
            row = copy.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
            if others := differences(orjson.loads(row[0]), fingerprint):
                raise NotASnapshotError(f"{snapshot} was written under other settings: {'; '.join(others)}")
            copy.execute("BEGIN")
            restored = _go_back(copy, made_at if step is None else step)
            if restored.step < made_at:
                restored = restored._replace(redone=_begin_again(copy, restored.step, snapshot))
            copy.execute("DROP TABLE snapshot")
            copy.execute(f"PRAGMA application_id={schema.APPLICATION}")
            copy.execute("COMMIT")
    return restored


def _go_back(journal: sqlite3.Connection, step: int) -> Restored:
    """Undo what trainers did at `step` and later; the caller's transaction is open."""
    forgotten = journal.execute("SELECT value FROM meta WHERE key = 'forgotten'").fetchone()
    if forgotten is not None and step <= forgotten[0]:
        raise WrongStepError(
            f"prompts of step {forgotten[0]} and earlier were forgotten, step {step} cannot be restored"
        )
    consumed = "SELECT count(*), coalesce(sum(size), 0), task FROM consumed WHERE step >= ? GROUP BY task"
    by_task = journal.execute(consumed, (step,)).fetchall()
    groups = sum(number for number, _, _ in by_task)
    journal.executemany(
        "UPDATE totals SET groups = groups - ?, samples = samples - ? WHERE task = ? AND outcome = 'consumed'", by_task
    )
    # Below 1 is what comes back; what waits in the tail may have left its first numbers by now.
    first = journal.execute("SELECT min(coalesce(min(number), 1), 1) FROM again").fetchone()[0]
    journal.execute(
        "INSERT INTO again (number, task, prompt_id, prompt, ids) "
        "SELECT ? + row_number() OVER (ORDER BY number), task, prompt_id, prompt, ids FROM consumed WHERE step >= ?",
        (first - groups - 1, step),
    )
    journal.execute("DELETE FROM consumed WHERE step >= ?", (step,))
    journal.execute("UPDATE meta SET value = ? WHERE key = 'step' AND value >= ?", (step - 1, step))
    # Its weights are the trainer's to load now: those of the journal may be later, and the engines' are what they are.
    journal.execute("DELETE FROM meta WHERE key = 'version'")
    freed = 0
    leases = "SELECT batch_id, group_ids FROM leases WHERE step >= ? ORDER BY number DESC"
    for batch_id, group_ids in journal.execute(leases, (step,)).fetchall():
        ids = tuple(orjson.loads(group_ids))
        Tables(journal, 0).write(Unleased(batch_id, ids))
        freed += len(ids)
    return Restored(step, groups, freed, 0)


def _begin_again(journal: sqlite3.Connection, step: int, snapshot: Path) -> int:
    """Forget what was made by weights of more than `step` trainer steps; returns how many samples that are."""
    later: list[tuple[int, str]] = []
    rows = journal.execute(
        "SELECT samples.number, group_id, status, state, tokens FROM samples JOIN groups USING (group_id) "
        "WHERE account != 'leased'"
    )
    for number, group_id, status, state, tokens in rows:
        try:
            sample = decode_sample(status, state, tokens)
        except Exception as error:
            raise NotASnapshotError(f"{snapshot} is damaged: {type(error).__name__}: {error}") from error
        if any(span.version is not None and span.version > step for span in sample.all_versions()):
            later.append((number, group_id))
    routed = "DELETE FROM experts WHERE (group_id, member) = (SELECT group_id, member FROM samples WHERE number = ?)"
    for forget in (routed, "DELETE FROM samples WHERE number = ?"):
        journal.executemany(forget, ((number,) for number, _ in later))
    journal.executemany(
        "UPDATE groups SET account = 'open', place = 0 WHERE group_id = ?", ((group_id,) for _, group_id in later)
    )
    return len(later)


def _reading(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


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
        made.touch()  # SQLite would not say why it cannot
        yield made
        sync(made)
        made.replace(target)
        sync(target.parent)
    finally:
        _forget(made)


def _forget(made: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            made.with_name(made.name + suffix).unlink()
