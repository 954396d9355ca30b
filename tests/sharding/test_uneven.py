"""What is ready is taken, however it is dealt."""

from __future__ import annotations

import asyncio

import pytest

from tests.sharding.stage import staged, until
from tests.support.virtual import virtual

PATIENCE_S = 1.5  # for a shard that lags, and the way to both


@pytest.mark.parametrize(("most", "least"), [(3, 1), (39, 1), (4, 0)])
def test_what_is_dealt_unevenly_is_taken_when_it_is_ready(most: int, least: int) -> None:
    """P22: what one shard has beyond its share makes up for what another lacks, in a few calls and not at the end."""

    @virtual
    async def history() -> None:
        async with staged(2) as (coordinator, one, two):
            one.room, two.room = most, least
            await until(lambda: (len(one.ready), len(two.ready)) == (most, least))
            one.calls.clear()
            loop = asyncio.get_running_loop()
            began = loop.time()
            batch = await coordinator.take_batch(0, most + least, 600.0)
            assert len(batch["groups"]) == most + least
            assert loop.time() - began < PATIENCE_S
            assert one.calls.count("ready_groups") <= 4

    history()


@virtual
async def test_what_comes_late_is_taken_when_it_comes() -> None:
    """P22: a batch that is whole with a group that a slow shard makes is there then, although that lacks its share."""
    async with staged(2) as (coordinator, one, two):
        one.room, two.room = 3, 0
        taking = asyncio.ensure_future(coordinator.take_batch(0, 4, 600.0))
        await asyncio.sleep(60.0)
        assert not taking.done()
        loop = asyncio.get_running_loop()
        began, two.room = loop.time(), 1
        assert len((await taking)["groups"]) == 4
        assert loop.time() - began < PATIENCE_S


@virtual
async def test_shards_in_step_each_give_their_share() -> None:
    """P33: where every shard has its share nobody gives more, and nobody is waited for."""
    async with staged(2) as (coordinator, one, two):
        await until(lambda: min(len(one.ready), len(two.ready)) >= 10)
        loop = asyncio.get_running_loop()
        began = loop.time()
        batch = await coordinator.take_batch(0, 8, 600.0)
        assert loop.time() - began < 0.1
        assert sorted(len(shard.leases[batch["batch_id"]][1]) for shard in (one, two)) == [4, 4]
