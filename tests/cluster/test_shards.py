"""Shards in actors: asked, lost, and back with everything they had."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.ray.shard import RayShard, ray_shards
from rollout_svc.sharding.protocol import ShardLost
from tests.cluster.configs import engine, lines, service
from tests.cluster.nodes import OTHERS, Nodes

SETTLED = ("consumed", "filtered", "expired", "failed")


def two_shards(folder: Path, **sections: Any) -> Config:
    """Two shards with an engine each."""
    engines = (engine(at=address) for address in OTHERS[:2])
    own = {"buffer": {"path": str(folder / "journal")}, "producer": {"shards": 2}}
    return config_from_mapping(service(*engines, **own, **sections))


async def answered(shard: RayShard, name: str, within_s: float = 60.0, **given: Any) -> Any:
    """Ask until the shard is there: while it is started again it is lost to whoever asks."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await shard.call(name, given)
            except ShardLost:
                await asyncio.sleep(0.1)  # a try, not a wait: nobody tells when Ray has started an actor


async def opened(shard: RayShard) -> None:
    """Have a shard begin, as its coordinator does."""
    await answered(shard, "ready")
    await answered(shard, "pause", deadline_s=5.0)
    await answered(shard, "resume")


async def ids_of(leased: Any) -> list[str]:
    """The prompts of a lease."""
    return [orjson.loads(record)["prompt"]["id"] for record in await leased.records()]


async def pid_of(shard: RayShard) -> int:
    """The process of a shard's actor."""
    from ray.util.state import get_actor

    found: Any = await asyncio.to_thread(get_actor, shard.actor._actor_id.hex())
    return int(found.pid)


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("nodes")
def test_a_shard_that_is_killed_comes_back_with_what_it_had(tmp_path: Path) -> None:
    """Killed with groups ready, leased and consumed it has each of them again, once, and an engine."""  # P31

    async def run() -> None:
        config = two_shards(tmp_path)
        async with ray_shards(config) as shards:
            first, second = shards
            await asyncio.gather(opened(first), opened(second))
            assert (await first.call("status", {}))["state"] == "running"
            await first.call("put_prompts", {"task": "t", "prompts": lines(4)})
            await second.call("put_prompts", {"task": "t", "prompts": lines(2, first=4)})
            assert await first.ready_groups(0, 4, 60.0) == 4
            consumed = await first.lease(0, 1, "b0.s0")
            given = await ids_of(consumed)
            await first.call("ack", {"batch_id": "b0.s0"})
            leased = await first.lease(1, 1, "b1.s0")
            lent = await ids_of(leased)

            life, pid = first.life, await pid_of(first)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ShardLost):
                await leased.records()
            await answered(first, "ready")
            assert first.life == life + 1
            assert second.life == 1
            status = await first.call("status", {})
            assert status["state"] == "paused", "it is held again"
            groups = status["ledger"]["groups"]
            assert groups["admitted"] == 4 == sum(count for name, count in groups.items() if name != "admitted")
            assert (groups["consumed"], groups["leased"]) == (1, 1)
            assert await ids_of(await first.lease(1, 1, "b1.s0")) == lent
            await opened(first)
            assert await first.ready_groups(1, 2, 60.0) == 2
            rest = await ids_of(await first.lease(1, 4, "b2.s0"))
            assert sorted(given + lent + rest) == ["p0", "p1", "p2", "p3"]
            assert await first.call("put_prompts", {"task": "t", "prompts": lines(4)}) == {"accepted": 0}
            assert await second.ready_groups(0, 2, 60.0) == 2

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_shards_leave_nothing_behind(nodes: Nodes, tmp_path: Path) -> None:
    """An error of the service is that error here; after the end no actor of theirs is alive."""
    from ray.util.state import list_actors

    async def run() -> None:
        async with ray_shards(two_shards(tmp_path)) as shards:
            await asyncio.gather(*(answered(shard, "ready") for shard in shards))
            with pytest.raises(BadRequest, match="deadline_s"):
                await shards[0].call("pause", {"deadline_s": -1.0})

    asyncio.run(run())
    alive = [actor for actor in list_actors(address=nodes.address) if actor.state == "ALIVE"]
    assert [actor.class_name for actor in alive if actor.class_name in ("ShardActor", "EngineHost")] == []


@pytest.mark.timeout(120)
def test_a_shard_whose_journal_is_refused_ends_the_start(nodes: Nodes, tmp_path: Path) -> None:
    """P35: whoever starts it is told what is wrong, long before engines are given up; nothing is half-started."""
    import rollout_svc.ray

    journals = [tmp_path / "journal.s0", tmp_path / "journal.s1"]
    for journal in journals:
        journal.write_text("no journal")
    config = two_shards(tmp_path, start_timeout_s=600)
    with pytest.raises(ConfigError, match=r"journal\.s[01]"):
        rollout_svc.ray.start(config, name="refused", timeout_s=90)
    assert {journal.read_text() for journal in journals} == {"no journal"}
