"""What the tables hold, as what a service goes on from.

Invariants:

- Nothing is changed by reading.
- A group that was under way is unfinished, with each member as it was noted last; one that was never noted has not
  begun.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import orjson

from rollout_svc.buffer.journal.records import decode_prompt, decode_sample
from rollout_svc.buffer.journal.routing import Piece, join
from rollout_svc.buffer.recovered import FoundGroup, FoundLease, Position, Pushed, Recovered
from rollout_svc.ledger import Account
from rollout_svc.prompt import Prompt
from rollout_svc.sample.state import SampleState

__all__ = ["consumed_since", "read_journal"]

_AGAIN: Final = "SELECT prompt_id, task, prompt, ids FROM again"
_GROUPS: Final = (
    "SELECT group_id, task, prompt_id, prompt, ids, size, account, hand_backs, cuts FROM groups "
    "ORDER BY CASE account WHEN 'open' THEN 1 ELSE 0 END, place, number"
)

_EXPERTS: Final = (
    "SELECT member, piece, dtype, tokens, layers, top_k, data FROM experts WHERE group_id = ? ORDER BY member, piece"
)


def read_journal(connection: sqlite3.Connection) -> Recovered:
    """Read everything; raises sqlite3.Error, or whatever a damaged blob raises."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    groups, samples = _settled(connection)
    return Recovered(
        groups=tuple(_groups(connection)),
        leases=tuple(_leases(connection)),
        ended=tuple(connection.execute("SELECT batch_id, fate FROM ended ORDER BY number")),
        positions=_positions(connection),
        pushed=_pushed(connection),
        returned=tuple(_prompts(connection, f"{_AGAIN} WHERE number < 1 ORDER BY number")),
        again=tuple(_prompts(connection, f"{_AGAIN} WHERE number >= 1 ORDER BY number")),
        settled_groups=groups,
        settled_samples=samples,
        late_discarded=meta.get("late_discarded", 0),
        redone=meta.get("redone", 0),
        version=meta.get("version"),
        weights_path=meta.get("weights_path"),
        step=meta.get("step"),
    )


def consumed_since(connection: sqlite3.Connection, step: int) -> list[Prompt]:
    """Prompts of groups that were consumed at `step` or later, oldest first."""
    query = "SELECT prompt_id, task, prompt, ids FROM consumed WHERE step >= ? ORDER BY number"
    return list(_prompts(connection, query, step))


def _prompts(connection: sqlite3.Connection, query: str, *arguments: Any) -> Iterator[Prompt]:
    for prompt_id, task, prompt, ids in connection.execute(query, arguments):
        yield decode_prompt(prompt_id, task, prompt, ids)


def _groups(connection: sqlite3.Connection) -> Iterator[FoundGroup]:
    routed = {group_id for (group_id,) in connection.execute("SELECT DISTINCT group_id FROM experts")}
    for row in connection.execute(_GROUPS):
        group_id, task, prompt_id, prompt, ids, size, account, hand_backs, cuts = row
        members = [SampleState()] * size
        rows = connection.execute("SELECT member, status, state, tokens FROM samples WHERE group_id = ?", (group_id,))
        for member, status, state, tokens in rows:
            members[member] = decode_sample(status, state, tokens).handed_back()
        if group_id in routed:
            for member, experts in _experts(connection, group_id).items():
                if members[member].packed is not None or members[member].segments:  # else it begins again
                    members[member] = members[member]._replace(experts=experts)
        yield FoundGroup(
            group_id=group_id,
            prompt=decode_prompt(prompt_id, task, prompt, ids),
            account="aborted" if account == "open" else account,
            hand_backs=hand_backs,
            cuts=cuts,
            samples=tuple(members),
        )


def _experts(connection: sqlite3.Connection, group_id: str) -> dict[int, Any]:
    """Routed experts of a group's members, of those that have some."""
    pieces: dict[int, list[Piece]] = {}
    for member, *piece in connection.execute(_EXPERTS, (group_id,)):
        pieces.setdefault(member, []).append(Piece(*piece))
    return {member: join(rows) for member, rows in pieces.items()}


def _leases(connection: sqlite3.Connection) -> Iterator[FoundLease]:
    query = "SELECT batch_id, step, group_ids, expires_at, metrics FROM leases ORDER BY number"
    for batch_id, step, group_ids, expires_at, metrics in connection.execute(query):
        yield FoundLease(batch_id, step, tuple(orjson.loads(group_ids)), expires_at, orjson.loads(metrics))


def _positions(connection: sqlite3.Connection) -> dict[str, Position]:
    rows = connection.execute("SELECT task, used, state FROM sources")
    return {task: Position(used, None if state is None else orjson.loads(state)) for task, used, state in rows}


def _pushed(connection: sqlite3.Connection) -> dict[str, Pushed]:
    known: dict[str, set[str]] = {}
    for task, prompt_id in connection.execute("SELECT task, prompt_id FROM pushed"):
        known.setdefault(task, set()).add(prompt_id)
    waiting: dict[str, dict[str, Any]] = {task: {} for task in known}
    query = "SELECT task, prompt_id, line FROM pushed WHERE line IS NOT NULL ORDER BY place"
    for task, prompt_id, line in connection.execute(query):
        waiting[task][prompt_id] = orjson.loads(line)
    return {task: Pushed(frozenset(ids), waiting[task]) for task, ids in known.items()}


def _settled(connection: sqlite3.Connection) -> tuple[dict[str, dict[Account, int]], dict[Account, int]]:
    """Totals of groups by task and outcome, and of samples by outcome."""
    by_task: dict[str, dict[Account, int]] = {}
    of_samples: dict[Account, int] = {}
    for task, outcome, groups, samples in connection.execute("SELECT task, outcome, groups, samples FROM totals"):
        by_task.setdefault(task, {})[outcome] = groups
        of_samples[outcome] = of_samples.get(outcome, 0) + samples
    return by_task, of_samples
