"""What a note does to the tables.

Invariants:

- A note changes the tables only through `write`, inside the caller's transaction.
- A note about a group that is not there, or about a sample of one, changes nothing: it was settled before.
- Totals of settled groups are counted when the group leaves, so that totals and groups are always of one moment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson

from rollout_svc.buffer.journal import notes
from rollout_svc.buffer.journal.records import encode_ids, encode_sample

__all__ = ["REMEMBERED_LEASES", "Tables"]

REMEMBERED_LEASES: Final = 1024
"""Ended leases whose fate is still told to a late ack."""

_PUT_SAMPLE: Final = (
    "INSERT INTO samples (group_id, member, status, state, tokens) SELECT ?, ?, ?, ?, ? "
    "WHERE EXISTS (SELECT 1 FROM groups WHERE group_id = ?) ON CONFLICT (group_id, member) "
    "DO UPDATE SET status = excluded.status, state = excluded.state, tokens = excluded.tokens"
)
_COUNT: Final = (
    "INSERT INTO totals SELECT task, ?, 1, size FROM groups WHERE group_id = ? ON CONFLICT (task, outcome) "
    "DO UPDATE SET groups = groups + 1, samples = samples + excluded.samples"
)
_SET_META: Final = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Tables:
    """Writes notes; used by one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, keep_steps: int) -> None:
        """Write to `connection`; prompts of consumed groups are kept for `keep_steps` steps."""
        self._do = connection.execute
        self._do_many = connection.executemany
        self._keep_steps = keep_steps
        self._members: dict[str, dict[int, notes.Member]] = {}  # of the transaction under way, by group
        self._writers: dict[type, Callable[[Any], None]] = {
            notes.Pushed: self._pushed,
            notes.Admitted: self._admitted,
            notes.Kept: lambda note: self._put(note.members),
            notes.HandedBack: self._handed_back,
            notes.Saved: self._saved,
            notes.Settled: self._settled,
            notes.Leased: self._leased,
            notes.Unleased: self._unleased,
            notes.Consumed: self._consumed,
            notes.Versioned: lambda note: self._set("version", note.version),
            notes.Tallied: self._tallied,
        }

    def write(self, *some: notes.Note) -> None:
        """Write notes, in order; the caller's transaction is open. Of a sample only the last state is written."""
        for note in some:
            self._writers[type(note)](note)
        members, self._members = self._members, {}
        self._do_many(_PUT_SAMPLE, (_row(member) for group in members.values() for member in group.values()))

    # -- prompts ---------------------------------------------------------------------------------------------

    def _pushed(self, note: notes.Pushed) -> None:
        rows = ((note.task, prompt_id, line) for prompt_id, line in note.lines)
        self._do_many("INSERT OR IGNORE INTO pushed (task, prompt_id, line) VALUES (?, ?, ?)", rows)

    def _admitted(self, note: notes.Admitted) -> None:
        if note.used is None:
            self._do(
                "DELETE FROM again WHERE number = "
                "(SELECT number FROM again WHERE task = ? AND prompt_id = ? ORDER BY number LIMIT 1)",
                (note.task, note.prompt_id),
            )
        else:
            self._do(
                "INSERT INTO sources VALUES (?, ?, ?) "
                "ON CONFLICT (task) DO UPDATE SET used = excluded.used, state = excluded.state",
                (note.task, note.used, note.source_state),
            )
            self._do("UPDATE pushed SET line = NULL WHERE task = ? AND prompt_id = ?", (note.task, note.prompt_id))
        self._do(
            "INSERT INTO groups (group_id, task, prompt_id, prompt, ids, size, account) "
            "VALUES (?, ?, ?, ?, ?, ?, 'open')",
            (note.group_id, note.task, note.prompt_id, note.prompt, encode_ids(note.ids), note.size),
        )

    # -- work ------------------------------------------------------------------------------------------------

    def _put(self, members: Iterable[notes.Member]) -> None:
        for member in members:
            self._members.setdefault(member.group_id, {})[member.member] = member

    def _handed_back(self, note: notes.HandedBack) -> None:
        row = (note.hand_backs, note.cuts, note.group_id)
        self._do("UPDATE groups SET hand_backs = ?, cuts = ? WHERE group_id = ?", row)
        self._put(note.members)

    def _saved(self, note: notes.Saved) -> None:
        self._put(note.members)
        self._make_ready([note.group_id], in_front=False)

    def _make_ready(self, group_ids: Sequence[str], *, in_front: bool) -> None:
        """Line groups up for the next batch: at the end, or before all others."""
        [last, first] = self._do("SELECT max(place), min(place) FROM groups WHERE account = 'ready'").fetchone()
        start = (first or 0) - len(group_ids) if in_front else (last or 0) + 1
        self._do_many(
            "UPDATE groups SET account = 'ready', place = ? WHERE group_id = ?",
            ((start + offset, group_id) for offset, group_id in enumerate(group_ids)),
        )

    def _settled(self, note: notes.Settled) -> None:
        if note.again:
            self._do(
                "INSERT INTO again (task, prompt_id, prompt, ids) "
                "SELECT task, prompt_id, prompt, ids FROM groups WHERE group_id = ?",
                (note.group_id,),
            )
        self._end(note.group_id, note.outcome)

    def _end(self, group_id: str, outcome: str) -> None:
        self._members.pop(group_id, None)
        self._do(_COUNT, (outcome, group_id))
        self._do("DELETE FROM samples WHERE group_id = ?", (group_id,))
        self._do("DELETE FROM groups WHERE group_id = ?", (group_id,))

    # -- trainers --------------------------------------------------------------------------------------------

    def _leased(self, note: notes.Leased) -> None:
        ids = orjson.dumps(note.group_ids)
        row = (note.batch_id, note.step, note.expires_at, ids, note.metrics)
        self._do("INSERT INTO leases (batch_id, step, expires_at, group_ids, metrics) VALUES (?, ?, ?, ?, ?)", row)
        self._do_many("UPDATE groups SET account = 'leased' WHERE group_id = ?", ((i,) for i in note.group_ids))

    def _unleased(self, note: notes.Unleased) -> None:
        self._end_lease(note.batch_id, "expired")
        self._make_ready(note.group_ids, in_front=True)

    def _consumed(self, note: notes.Consumed) -> None:
        self._end_lease(note.batch_id, "acknowledged")
        for group_id in note.group_ids:
            self._do(
                "INSERT INTO consumed (group_id, step, task, prompt_id, prompt, ids, size) "
                "SELECT group_id, ?, task, prompt_id, prompt, ids, size FROM groups WHERE group_id = ?",
                (note.step, group_id),
            )
            self._end(group_id, "consumed")
        self._set("step", note.step)
        last = note.step - self._keep_steps
        if self._do("DELETE FROM consumed WHERE step <= ?", (last,)).rowcount:
            self._set("forgotten", last)  # an earlier step than the next cannot be restored

    def _end_lease(self, batch_id: str, fate: str) -> None:
        self._do("DELETE FROM leases WHERE batch_id = ?", (batch_id,))
        number = self._do("INSERT INTO ended (batch_id, fate) VALUES (?, ?)", (batch_id, fate)).lastrowid or 0
        self._do("DELETE FROM ended WHERE number <= ?", (number - REMEMBERED_LEASES,))

    # -- the rest --------------------------------------------------------------------------------------------

    def _tallied(self, note: notes.Tallied) -> None:
        self._set("late_discarded", note.late_discarded)
        self._set("redone", note.redone)

    def _set(self, key: str, value: int) -> None:
        self._do(_SET_META, (key, value))


def _row(member: notes.Member) -> tuple[object, ...]:
    group_id, index, state, head = member
    return (group_id, index, state.status, *encode_sample(state, head), group_id)
