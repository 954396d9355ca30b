"""What notes do to the tables.

Invariants:

- Notes change the tables only through `write`, inside the caller's transaction.
- A note about a group that is not there, or about a sample of one, changes nothing: it was settled before.
- Routed experts are written where a note says that they are others, with their sample; they leave with its group.
  Where there never were any, nothing is asked about them.
- Totals of settled groups are counted when the group leaves, so that totals and groups are always of one moment.
- What is written together comes to what it would one by one; of a sample, a source or a line only the last is written,
  in as few statements as there can be: each is a turn in which the thread and the loop wait for each other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import orjson

from rollout_svc.buffer.journal import notes
from rollout_svc.buffer.journal.records import encode_ids, encode_sample
from rollout_svc.buffer.journal.routing import split

__all__ = ["REMEMBERED_LEASES", "Tables"]

REMEMBERED_LEASES: Final = 1024
"""Ended leases whose fate is still told to a late ack."""

_ROWS: Final = 64  # samples in one statement
_AMONG: Final = "(SELECT value FROM json_each(?))"
_PUT_SAMPLES: Final = (
    "INSERT INTO samples (group_id, member, status, state, tokens) VALUES {} ON CONFLICT (group_id, member) "
    "DO UPDATE SET status = excluded.status, state = excluded.state, tokens = excluded.tokens"
)
_COUNT: Final = (
    "INSERT INTO totals SELECT task, ?, count(*), sum(size) FROM groups "  # noqa: S608 - our own names
    f"WHERE group_id IN {_AMONG} GROUP BY task ON CONFLICT (task, outcome) "
    "DO UPDATE SET groups = groups + excluded.groups, samples = samples + excluded.samples"
)
_MAKE_READY: Final = (
    "UPDATE groups SET account = 'ready', place = ? + listed.key FROM json_each(?) AS listed "
    "WHERE group_id = listed.value"
)
_MOVE_SOURCE: Final = (
    "INSERT INTO sources VALUES (?, ?, ?) ON CONFLICT (task) DO UPDATE SET used = excluded.used, state = excluded.state"
)
_USE_LINES: Final = f"UPDATE pushed SET line = NULL WHERE task = ? AND prompt_id IN {_AMONG}"  # noqa: S608
_THERE: Final = f"SELECT group_id FROM groups WHERE group_id IN {_AMONG}"  # noqa: S608
_FORGET: Final = tuple(f"DELETE FROM {table} WHERE group_id IN {_AMONG}" for table in ("samples", "groups"))  # noqa: S608
_FORGET_EXPERTS: Final = f"DELETE FROM experts WHERE group_id IN {_AMONG}"  # noqa: S608
_DROP_EXPERTS: Final = "DELETE FROM experts WHERE group_id = ? AND member = ?"
_PUT_EXPERTS: Final = (
    "INSERT INTO experts (group_id, member, piece, dtype, tokens, layers, top_k, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_LEND: Final = f"UPDATE groups SET account = 'leased' WHERE group_id IN {_AMONG}"  # noqa: S608
_SET_META: Final = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Tables:
    """Writes notes; used by one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, keep_steps: int) -> None:
        """Write to `connection`; prompts of consumed groups are kept for `keep_steps` steps."""
        self._do = connection.execute
        self._do_many = connection.executemany
        self._keep_steps = keep_steps
        self._routed: bool | None = None  # whether there may be routed experts; None: nobody has looked
        self._places: tuple[int, int] | None = None  # of the ready groups, before the first and after the last
        # Of the transaction under way:
        self._members: dict[str, dict[int, notes.Member]] = {}
        self._experts: dict[str, dict[int, Any]] = {}
        self._sources: dict[str, tuple[int | None, bytes | None]] = {}
        self._used: dict[str, list[str]] = {}
        self._ready: list[str] = []
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
            notes.Versioned: self._versioned,
            notes.Tallied: self._tallied,
        }

    def write(self, *some: notes.Note) -> None:
        """Write notes, in order; the caller's transaction is open."""
        for note in some:
            self._writers[type(note)](note)
        self._line_up()
        self._write_sources()
        self._write_members()

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
            self._sources[note.task] = note.used, note.source_state
            self._used.setdefault(note.task, []).append(note.prompt_id)
        self._do(
            "INSERT INTO groups (group_id, task, prompt_id, prompt, ids, size, account) "
            "VALUES (?, ?, ?, ?, ?, ?, 'open')",
            (note.group_id, note.task, note.prompt_id, note.prompt, encode_ids(note.ids), note.size),
        )

    def _write_sources(self) -> None:
        for task, (used, state) in self._sources.items():
            self._do(_MOVE_SOURCE, (task, used, state))
            self._do(_USE_LINES, (task, orjson.dumps(self._used[task]).decode()))
        self._sources, self._used = {}, {}

    # -- work ------------------------------------------------------------------------------------------------

    def _put(self, members: Iterable[notes.Member]) -> None:
        for member in members:
            self._members.setdefault(member.group_id, {})[member.member] = member
            if member.routed:
                self._experts.setdefault(member.group_id, {})[member.member] = member.state.experts

    def _write_members(self) -> None:
        if not self._members:
            return
        named = orjson.dumps(list(self._members)).decode()
        there = self._do(_THERE, (named,)).fetchall()
        members = (member for (group_id,) in there for member in self._members[group_id].values())
        while some := list(islice(members, _ROWS)):
            values = [value for member in some for value in _row(member)]
            self._do(_PUT_SAMPLES.format(", ".join(["(?, ?, ?, ?, ?)"] * len(some))), values)
        for (group_id,) in there:
            for index, experts in self._experts.get(group_id, {}).items():
                self._write_experts(group_id, index, experts)
        self._members, self._experts = {}, {}

    def _write_experts(self, group_id: str, member: int, experts: Any) -> None:
        """Have a sample's routed experts in the file, and no others; None: it has none."""
        if self._may_be_routed():
            self._do(_DROP_EXPERTS, (group_id, member))
        if experts is not None:
            self._routed = True
            for piece in split(experts() if callable(experts) else experts):
                self._do(_PUT_EXPERTS, (group_id, member, *piece))

    def _may_be_routed(self) -> bool:
        if self._routed is None:
            self._routed = bool(self._do("SELECT EXISTS (SELECT 1 FROM experts)").fetchone()[0])
        return self._routed

    def _handed_back(self, note: notes.HandedBack) -> None:
        row = (note.hand_backs, note.cuts, note.group_id)
        self._do("UPDATE groups SET hand_backs = ?, cuts = ? WHERE group_id = ?", row)
        self._put(note.members)

    def _saved(self, note: notes.Saved) -> None:
        self._put(note.members)
        self._ready.append(note.group_id)

    def _line_up(self, in_front: Sequence[str] = ()) -> None:
        """Line groups up for the next batch: those that were saved at the end, others before all."""
        if not (self._ready or in_front):
            return
        if self._places is None:
            first = self._do("SELECT min(place) FROM groups WHERE account = 'ready'").fetchone()[0]
            last = self._do("SELECT max(place) FROM groups WHERE account = 'ready'").fetchone()[0]
            self._places = (first or 0) - 1, (last or 0) + 1
        before, after = self._places
        if self._ready:
            self._do(_MAKE_READY, (after, orjson.dumps(self._ready).decode()))
        if in_front:
            self._do(_MAKE_READY, (before + 1 - len(in_front), orjson.dumps(in_front).decode()))
        self._places = before - len(in_front), after + len(self._ready)
        self._ready = []

    def _settled(self, note: notes.Settled) -> None:
        if note.again:
            self._do(
                "INSERT INTO again (task, prompt_id, prompt, ids) "
                "SELECT task, prompt_id, prompt, ids FROM groups WHERE group_id = ?",
                (note.group_id,),
            )
        self._end((note.group_id,), note.outcome)

    def _end(self, group_ids: Sequence[str], outcome: str) -> None:
        """Count groups out, and forget them."""
        self._line_up()
        for group_id in group_ids:
            self._members.pop(group_id, None)
            self._experts.pop(group_id, None)
        named = orjson.dumps(group_ids).decode()
        self._do(_COUNT, (outcome, named))
        for forget in (*_FORGET, _FORGET_EXPERTS) if self._may_be_routed() else _FORGET:
            self._do(forget, (named,))

    # -- trainers --------------------------------------------------------------------------------------------

    def _leased(self, note: notes.Leased) -> None:
        self._line_up()
        ids = orjson.dumps(note.group_ids)
        row = (note.batch_id, note.step, note.expires_at, ids, note.metrics)
        self._do("INSERT INTO leases (batch_id, step, expires_at, group_ids, metrics) VALUES (?, ?, ?, ?, ?)", row)
        self._do(_LEND, (ids.decode(),))

    def _unleased(self, note: notes.Unleased) -> None:
        self._end_lease(note.batch_id, "expired")
        self._line_up(note.group_ids)

    def _consumed(self, note: notes.Consumed) -> None:
        self._end_lease(note.batch_id, "acknowledged")
        self._do(
            "INSERT INTO consumed (group_id, step, task, prompt_id, prompt, ids, size) "
            "SELECT group_id, ?, task, prompt_id, prompt, ids, size FROM json_each(?) AS listed "
            "JOIN groups ON group_id = listed.value ORDER BY listed.key",
            (note.step, orjson.dumps(note.group_ids).decode()),
        )
        self._end(note.group_ids, "consumed")
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

    def _versioned(self, note: notes.Versioned) -> None:
        self._set("version", note.version)
        self._set("weights_path", note.path)

    def _set(self, key: str, value: int | str | None) -> None:
        self._do(_SET_META, (key, value))


def _row(member: notes.Member) -> tuple[object, ...]:
    state = member.state
    return (member.group_id, member.member, state.status, *encode_sample(state, member.head))
