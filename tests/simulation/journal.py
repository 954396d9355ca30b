"""A journal in memory that survives the service: what was durable when it died is what the next life finds.

Invariants:

- Only whole groups are in it: every member COMPLETED, judged for the tokens it has (P2, P6, P7, P31).
- It may be slow, and the service may die right before or right after a group became durable.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.group import Group
from rollout_svc.sample import SampleStatus

if TYPE_CHECKING:
    from tests.simulation.life import Life
    from tests.simulation.world import World

__all__ = ["SimStorage", "check_record"]


class SimStorage(MemoryStorage):
    """The storage port of one life; `world.journal` is what outlives it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world

    async def save(self, group: Group) -> None:
        """Make a group durable."""
        self._world.require(group.lane == "train", "P28", f"{group} of lane {group.lane} is written")
        self._life.saving[group.group_id] = group
        try:
            await self._save(group)
        finally:
            del self._life.saving[group.group_id]

    async def _save(self, group: Group) -> None:
        world = self._world
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
        members = [orjson.loads(sample.packed or b"{}") for sample in group.samples]
        for member in members:
            check_record(world, member)
        world.journal[group.group_id] = members
        world.say("journal", "has", group.group_id[-6:])
        if world.faults.draw(("put_crash_after",)):
            await world.ambush()
            await self._life.dies("put_crash_after")

    async def close(self) -> None:
        """Nothing to close."""


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
