"""The tables of a journal, and their version.

Invariants:

- A file of ours says so in its first 100 bytes (`APPLICATION`, `VERSION`), so that another is told apart without being
  opened.
- `meta.fingerprint` is written before the file has its name, and never changed.
- A sample's routed experts go with it. They lie in pieces, each a row: what a statement is given is copied while no
  other thread runs.
- A pushed id stays for good, without its line once that is used up: a push that is repeated is known.

Durability: WAL. With `synchronous=NORMAL` a commit that was answered survives a killed process, for it is in the file,
if not on the disk: a power cut may take the last ones back, whole and in order. `FULL` syncs each commit, which is what
most of its time goes to; what it costs is shared by everything that waited for it.
"""

from __future__ import annotations

import sqlite3
from typing import Final

__all__ = ["APPLICATION", "PRAGMAS", "SNAPSHOT", "VERSION", "create_tables"]

APPLICATION: Final = 0x726F6C6A
"""`application_id` of the file: "rolj"."""
SNAPSHOT: Final = 0x726F6C73
"""That of a snapshot: "rols", so that neither is taken for the other."""
VERSION: Final = 2
"""`user_version` of the file: raised with every change of the tables."""
PRAGMAS: Final = (
    "PRAGMA locking_mode=EXCLUSIVE",  # one service per journal; and no shared memory beside the file
    "PRAGMA journal_mode=WAL",
    "PRAGMA secure_delete=OFF",  # many builds overwrite with zeros what is deleted, which here is everything, soon
    "PRAGMA wal_autocheckpoint=4000",  # pages: 16 MB, some thousands of samples
)
_TABLES: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE totals (
    task TEXT NOT NULL, outcome TEXT NOT NULL, groups INTEGER NOT NULL, samples INTEGER NOT NULL,
    PRIMARY KEY (task, outcome)
) WITHOUT ROWID;
CREATE TABLE sources (task TEXT PRIMARY KEY, used INTEGER NOT NULL, state BLOB) WITHOUT ROWID;
CREATE TABLE pushed (
    place INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, prompt_id TEXT NOT NULL, line BLOB,
    UNIQUE (task, prompt_id)
);
CREATE INDEX pushed_waiting ON pushed (place) WHERE line IS NOT NULL;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, task TEXT NOT NULL,
    prompt_id TEXT NOT NULL, prompt BLOB NOT NULL, ids BLOB NOT NULL, size INTEGER NOT NULL,
    account TEXT NOT NULL, place INTEGER NOT NULL DEFAULT 0, hand_backs INTEGER NOT NULL DEFAULT 0,
    cuts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX groups_waiting ON groups (account, place);
CREATE TABLE samples (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL, member INTEGER NOT NULL, status TEXT NOT NULL,
    state BLOB NOT NULL, tokens BLOB, UNIQUE (group_id, member)
);
CREATE TABLE experts (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL, member INTEGER NOT NULL, piece INTEGER NOT NULL,
    dtype TEXT NOT NULL, tokens INTEGER NOT NULL, layers INTEGER NOT NULL, top_k INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE (group_id, member, piece)
);
CREATE TABLE leases (
    number INTEGER PRIMARY KEY AUTOINCREMENT, batch_id TEXT NOT NULL UNIQUE, step INTEGER NOT NULL,
    expires_at REAL NOT NULL, group_ids BLOB NOT NULL, metrics BLOB NOT NULL
);
CREATE TABLE ended (number INTEGER PRIMARY KEY AUTOINCREMENT, batch_id TEXT NOT NULL, fate TEXT NOT NULL);
CREATE TABLE consumed (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL, step INTEGER NOT NULL, task TEXT NOT NULL,
    prompt_id TEXT NOT NULL, prompt BLOB NOT NULL, ids BLOB NOT NULL, size INTEGER NOT NULL
);
CREATE INDEX consumed_steps ON consumed (step);
CREATE TABLE again (
    number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, prompt_id TEXT NOT NULL, prompt BLOB NOT NULL,
    ids BLOB NOT NULL
);
"""


def create_tables(connection: sqlite3.Connection, fingerprint: bytes, created: float) -> None:
    """Make an empty journal of a new database, in one transaction.

    Args:
        connection: to an empty file.
        fingerprint: JSON of the settings it belongs to.
        created: wall-clock time, seconds since the epoch.
    """
    connection.executescript(f"BEGIN;{_TABLES}COMMIT;")
    connection.execute("INSERT INTO meta VALUES ('fingerprint', ?), ('created', ?)", (fingerprint, created))
    connection.execute(f"PRAGMA application_id={APPLICATION}")
    connection.execute(f"PRAGMA user_version={VERSION}")
    connection.commit()
