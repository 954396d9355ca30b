"""A shard that cannot be made: its journal is another's, or its settings do not work there."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import ConfigError, InUse, NotNow
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import DISK, config_of, until
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual


@virtual
async def test_a_shard_that_cannot_be_ends_the_start_at_once() -> None:
    """P35: what a shard finds wrong, such as a journal of another number of shards, is not waited out."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    shards[1].refuses["status"] = ConfigError.at("buffer.path", "journal.db.s1 is another's")
    coordinator = Coordinator(config_of(start_timeout_s=600.0), shards)
    began = asyncio.get_running_loop().time()
    await coordinator.start()
    with pytest.raises(ConfigError, match=r"buffer\.path: journal\.db\.s1 is another's"):
        await coordinator.ready()
    assert asyncio.get_running_loop().time() - began < 5.0
    await coordinator.stop()


@virtual
async def test_status_says_when_a_shard_is_made_again() -> None:
    """P22: a shard whose journal is in use is held, says when it tries again, and is in step once that has worked."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    locked = InUse.at("buffer.path", "journal.db.s1 is in use by another process; it is tried again in 30.0 s")
    locked.again_in_s = 30.0
    shards[1].refuses["status"] = locked
    coordinator = Coordinator(config_of(), shards)
    await coordinator.start()
    with pytest.raises(InUse):
        await coordinator.ready()  # whoever starts it need not wait
    await until(lambda: coordinator.members.by_id["s0"].inside)
    told = (await coordinator.status())["shards"]
    assert (told[0]["state"], told[0]["again_in_s"]) == ("in_step", None)
    assert told[1]["state"] == "held"
    assert "in use by another process" in told[1]["reason"]
    assert 25.0 < told[1]["again_in_s"] <= 30.0
    shards[1].refuses.clear()
    await until(lambda: coordinator.members.by_id["s1"].inside)
    assert (await coordinator.status())["shards"][1]["again_in_s"] is None
    await coordinator.stop()


@virtual
async def test_a_service_whose_shards_come_too_late_runs_all_the_same() -> None:
    """P23: that nobody was in step within `start_timeout_s` is told to who waited, and does not last for ever."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    for shard in shards:
        shard.start()
        shard.lost = True
    coordinator = Coordinator(config_of(), shards)
    await coordinator.start()
    with pytest.raises(NotNow, match="shards are not in step"):
        await coordinator.ready()
    assert str(coordinator.state) == "starting"
    for shard in shards:
        shard.rise()
    await until(lambda: str(coordinator.state) == "running")
    await coordinator.pause(deadline_s=1.0)
    await coordinator.stop()
    for shard in shards:
        await shard.close()


@virtual
async def test_weights_reach_a_fleet_that_waits_for_them() -> None:
    """P24: a start that waits for a shard whose weights are not the fleet's is over once an update brings it others."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    for shard, version in zip(shards, (3, 1), strict=True):
        shard.version = version
        shard.start()
    coordinator = Coordinator(config_of(start_timeout_s=600.0), shards)
    await coordinator.start()
    ready = asyncio.ensure_future(coordinator.ready())
    await until(lambda: "cannot be sent again" in coordinator.members.by_id["s1"].why)
    await until(lambda: coordinator.members.by_id["s0"].inside)
    began = asyncio.get_running_loop().time()
    with pytest.raises(NotNow, match="shards are not in step: s1: "):
        await coordinator.pause()
    await coordinator.update_weights(4, DISK, {"deadline_s": 1.0})
    await ready
    assert asyncio.get_running_loop().time() - began < 10.0
    await until(lambda: all(shard.open for shard in shards))
    assert {shard.version for shard in shards} == {4}
    await coordinator.stop()
    for shard in shards:
        await shard.close()


@virtual
async def test_weights_for_a_fleet_without_a_shard_are_refused() -> None:
    """P24: while no shard is in step there is nobody to give them to, and the answer says who is waited for."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    for shard in shards:
        shard.lost = True
    coordinator = Coordinator(config_of(), shards)
    await coordinator.start()
    with pytest.raises(NotNow, match=r"shards are not in step: s0: .*s1: "):
        await coordinator.update_weights(4, DISK, {"deadline_s": 1.0})
    await coordinator.stop()
