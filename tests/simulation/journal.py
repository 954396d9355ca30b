"""Journals that outlive the service: the real one on a database in memory, and one that only looks on.

Invariants:

- What is noted is written after a while, in order, in one transaction; what was not when the service died is lost.
- Only whole groups are saved: every member COMPLETED, judged for the tokens it has (P2, P6, P7, P31).
- It may be slow, and the service may die right before or right after a group became durable.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import orjson

from rollout_svc.buffer.journal import Journal, notes
from rollout_svc.buffer.journal.reading import read_journal
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.journal.writer import Writer
from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.group import Group
from rollout_svc.sample import SampleStatus

if TYPE_CHECKING:
    from tests.simulation.life import Life
    from tests.simulation.world import World

__all__ = ["SimJournal", "SimStorage", "check_record"]

R = TypeVar("R")
_GONE = ("packed", "experts", "segments", "response", "reward", "reward_parts", "prompt_ids", "response_ids", "meta")
_LINGER_S = 0.02  # as long as notes gather that nobody waits for
_KEEP_STEPS = 64


class _Desk:
    """What every storage of a life does around a save: it is slow, it may be deadly, and it looks at what it gets."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world

    async def before(self, group: Group) -> None:
        """Look at the group, and take a while."""
        world = self._world
        world.require(group.lane == "train", "P28", f"{group} of lane {group.lane} is written")
        strike = None
        if world.faults.draw(("put_blocked",)):
            strike = world.faults.strike("put_blocked")
        try:
            await (world.at_most(world.rng.uniform(0.3, 6.0)) if strike else asyncio.sleep(world.rng.uniform(0, 0.01)))
        finally:
            if strike is not None:
                strike.end()
        if world.faults.draw(("put_crash_before",)):
            await world.ambush()
            await self._life.dies("put_crash_before")
        whole = all(sample.status is SampleStatus.COMPLETED for sample in group.samples)
        world.require(whole, "P31", f"{group} was written although it is not complete")
        for sample in group.samples:
            check_record(world, orjson.loads(sample.packed or b"{}"))

    async def after(self) -> None:
        """It is durable: the service may die of it."""
        if self._world.faults.draw(("put_crash_after",)):
            await self._world.ambush()
            await self._life.dies("put_crash_after")

    def ended(self, group: Group) -> None:
        """Look at a group that ended: counts and reasons are left of it, and nothing else."""
        for sample in group.samples:
            left = [name for name in _GONE if getattr(sample, name)]
            self._world.require(not left, "P28", f"{sample} was settled with its {left}")
            self._world.require(bool(sample.reason), "P28", f"{sample} was settled without a reason")


class SimStorage(MemoryStorage):
    """A storage from which nothing comes back; `world.journal` says what was saved."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._desk = _Desk(life)

    async def save(self, group: Group) -> None:
        """Make a group durable."""
        self._life.saving[group.group_id] = group
        try:
            await self._desk.before(group)
            self._life.world.saved(group.group_id)
            await self._desk.after()
        finally:
            del self._life.saving[group.group_id]

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Look at it."""
        self._desk.ended(group)


class _SimWriter(Writer[notes.Note]):
    """Writes what gathered when its time has come, in the life that noted it: one that is killed takes it along."""

    def __init__(self, life: Life, connection: sqlite3.Connection, write: Callable[..., None]) -> None:
        self.failure = None
        self._world = life.world
        self._connection = connection
        self._write = lambda batch: write(*batch)
        self._notes: list[notes.Note] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._due: asyncio.TimerHandle | None = None

    def put(self, note: notes.Note) -> None:
        """Have it written soon."""
        self._notes.append(note)
        if self._due is None:
            delay = self._world.rng.uniform(0.0, _LINGER_S)
            self._due = asyncio.get_running_loop().call_later(delay, self._write_out)

    def _write_out(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None
        batch, self._notes = self._notes, []
        self._connection.execute("BEGIN")
        self._write(batch)
        self._connection.execute("COMMIT")
        for note in batch:
            self._world.durable.written(note)
            if isinstance(note, notes.Saved):
                self._world.saved(note.group_id)
        flushes, self._flushes = self._flushes, []
        for future in flushes:
            if not future.done():
                future.set_result(None)

    async def flush(self) -> None:
        """Wait until what was put is written."""
        if self._notes:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append(future)
            await future

    async def run(self, do: Callable[[sqlite3.Connection], R], within_s: float = 0.0) -> R:
        """Do something with the database."""
        self._write_out()
        return do(self._connection)

    async def close(self) -> None:
        """Write what is left."""
        self._write_out()


class SimJournal(Journal):
    """The real journal of one life, on the world's disk."""

    def __init__(self, life: Life) -> None:
        world, connection = life.world, life.world.disk
        recovered = read_journal(connection)
        super().__init__(connection, recovered, keep_steps=_KEEP_STEPS, wall=lambda: world.now)
        self._writer = _SimWriter(life, connection, Tables(connection, _KEEP_STEPS).write)
        self._life = life
        self._desk = _Desk(life)

    async def save(self, group: Group) -> None:
        """Make a group durable."""
        self._life.saving[group.group_id] = group
        try:
            await self._desk.before(group)
            await super().save(group)
            await self._desk.after()
        finally:
            del self._life.saving[group.group_id]

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Note it, and look at it."""
        self._desk.ended(group)
        super().settled(group, again=again)


def check_record(world: World, record: dict[str, object], oldest: int | None = None) -> None:
    """Compare a finished sample's record with what engines and judges really did.

    With `oldest` it is as it is handed over: tokens of older weights have to be masked.
    """
    name, require = record["sample_id"], world.require
    prompt, response, reward = record["prompt_ids"], record["response_ids"], record["reward"]
    assert isinstance(prompt, list)
    assert isinstance(response, list)
    require(record["status"] == "COMPLETED", "P2", f"{name} is {record['status']}")
    require(record["finish_reason"] in ("stop", "length"), "P2", f"{name} ended {record['finish_reason']}")
    problem = world.tokens.problem(prompt, response)
    require(problem is None, "P6", f"{name}: {problem}")
    if not isinstance(reward, float) or not 0 <= int(reward) < len(world.verdicts):
        world.breaks("P2", f"{name}: reward {reward} was given by nobody")
        return
    verdict = world.verdicts[int(reward)]
    judged = verdict.ids.get(str(name))
    require(judged == response, "P2", f"{name} has {response}, its verdict {verdict.number} was on {judged}")
    require(not verdict.void, "P13", f"{name} has verdict {verdict.number}, which a pause had taken back")
    versions: dict[int, object] = {}
    spans = record["weight_versions"]
    assert isinstance(spans, list)
    for span in spans:
        versions.update(dict.fromkeys(range(span["start"], span["end"]), span["version"]))
    for place, token in enumerate(response):
        made_by = world.tokens.weights(token)
        if made_by is not None and versions.get(place) != made_by:
            world.breaks("P7", f"{name}: token {place} was made by {made_by}, it is said {versions.get(place)}")
            return
    mask = record["loss_mask"]
    made = [token >= 1000 for token in response]
    young = [oldest is None or (v := versions.get(n)) is None or int(str(v)) >= oldest for n in range(len(response))]
    wanted = [int(ours and fresh) for ours, fresh in zip(made, young, strict=True)]
    require(mask == wanted, "P6" if oldest is None else "P32", f"{name}: mask {mask} of {versions}, oldest {oldest}")
    require(any(wanted) or not any(made), "P32", f"{name} has no token left that counts: {versions}, oldest {oldest}")
