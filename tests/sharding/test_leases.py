"""What is lent over several shards is lent once, whole, and ends once, whoever is slow, lost, or begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_svc.errors import Conflict, NotNow
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import check_books, staged, until
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual


def ids(batch: dict[str, Any]) -> list[str]:
    """The groups of a batch."""
    return [group["group_id"] for group in batch["groups"]]


@asynccontextmanager
async def another(coordinator: Coordinator, *shards: MemoryShard) -> AsyncIterator[Coordinator]:
    """A coordinator that begins over shards that another one lent from."""
    made = Coordinator(coordinator.config, shards)
    await made.start()
    try:
        yield made
    finally:
        for shard in shards:
            shard.speak()
        await made.stop()


async def both_have(one: MemoryShard, other: MemoryShard) -> None:
    """Let them have groups enough for whatever comes."""
    await until(lambda: len(one.ready) > 8 and len(other.ready) > 8)
    one.pace_s = other.pace_s = 1000.0


@virtual
async def test_a_step_that_is_being_lent_is_not_lent_again() -> None:
    """P31: who asks again while the groups are being leased gets that batch, also where the first has gone away."""
    async with staged() as (coordinator, one, other):
        await both_have(one, other)
        one.delay_s, other.delay_s = 0.01, 0.3
        for step, goes_away in ((0, False), (1, True)):
            first = asyncio.ensure_future(coordinator.take_batch(step, 6, 10.0))
            await until(lambda step=step: any(lease[0] == step for lease in one.leases.values()))
            if goes_away:
                first.cancel()
            again = await coordinator.take_batch(step, 6, 10.0)
            if not goes_away:
                assert ids(await first) == ids(again)
            leased = [groups for shard in (one, other) for at, groups in shard.leases.values() if at == step]
            assert sorted(name for names in leased for name in names) == sorted(ids(again))
            assert [lease["step"] for lease in coordinator.batches.leases].count(step) == 1


@virtual
async def test_a_take_ends_although_a_shard_does_not_lease() -> None:
    """P22: a shard that is silent in the middle of a lease does not hold up a take for as long as it may take."""
    async with staged(pause={"deadline_s": 60.0}) as (coordinator, one, other):
        await both_have(one, other)
        other.delay_s = 0.3
        began = asyncio.get_running_loop().time()
        taking = asyncio.ensure_future(coordinator.take_batch(0, 14, 4.0))
        await until(lambda: one.leases)
        other.hush()
        with pytest.raises(NotNow):
            await taking
        assert asyncio.get_running_loop().time() - began < 15.0
        other.speak()
        assert len(ids(await coordinator.take_batch(0, 14, 10.0))) == 14


@virtual
async def test_an_ack_that_a_shard_refuses_is_carried_out() -> None:
    """P1: an accepted ack is for good: who refuses its part is asked again, although nobody else asks."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        other.refuses["ack"] = NotNow("failed", "not now")
        with pytest.raises(NotNow, match="not now"):
            await coordinator.ack(batch["batch_id"])
        other.refuses.clear()
        await until(lambda: not one.leases and not other.leases and other.open)
        consumed = [name for s in (one, other) for name, account in s.accounts.items() if account == "consumed"]
        assert sorted(consumed) == sorted(ids(batch))
        assert (await coordinator.ack(batch["batch_id"]))["acknowledged"]
        check_books(coordinator)


@virtual
async def test_a_batch_whose_part_is_gone_is_not_handed_over() -> None:
    """P2: between the return of a shard that lost its part and its being held the step is a new batch, and whole."""
    async with staged(journal=False) as (coordinator, one, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        await until(lambda: len(one.ready) > 8)
        other.delay_s = 0.1
        other.die()
        other.rise()
        again = await coordinator.take_batch(0, 6, 10.0)
        assert again["batch_id"] != batch["batch_id"]
        assert len(ids(again)) == again["metrics"]["groups"] == 6
        assert (await coordinator.ack(again["batch_id"]))["acknowledged"]
        with pytest.raises(Conflict):
            await coordinator.ack(batch["batch_id"])
        await until(lambda: not one.leases and not other.leases)


@virtual
async def test_an_ack_that_comes_before_the_shards_have_spoken_is_not_lost() -> None:
    """P1, P31: a coordinator that does not know yet what was lent says so; the ack is not taken for a late one."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(3, 6, 10.0)
        async with another(coordinator, one, other) as again:
            with pytest.raises(NotNow) as told:
                await again.ack(batch["batch_id"])
            assert told.value.type == "starting"
            with pytest.raises(NotNow):
                await again.take_batch(4, 2, 10.0, ack=[batch["batch_id"]])
            await again.ready()
            after = await again.take_batch(4, 2, 10.0, ack=[batch["batch_id"]])
            assert "ack_expired" not in after
            assert not set(ids(after)) & set(ids(batch))


@virtual
async def test_shards_that_return_together_give_each_batch_once() -> None:
    """P31: what several shards have of several batches is lent once, in whatever order they are looked at."""
    async with staged(3) as (coordinator, *shards):
        lent = [await coordinator.take_batch(step, 6, 10.0) for step in range(3)]
        for shard, delay_s in zip(shards, (0.02, 0.021, 0.05), strict=True):
            shard.delay_s = delay_s
        async with another(coordinator, *shards) as again:
            await again.ready()
            shards[0].hush()  # it is lost to the coordinator, and is looked at again while the others are
            shards[1].hush()
            await until(lambda: len(again.members.outside) == 2)
            shards[0].speak()
            shards[1].speak()
            await again.ready()
            assert again.failure is None
            for step, batch in enumerate(lent):
                assert ids(await again.take_batch(step, 6, 10.0)) == ids(batch)
                await again.ack(batch["batch_id"])
            assert not any(shard.leases for shard in shards)


@virtual
async def test_a_part_whose_time_is_up_holds_nobody() -> None:
    """P31: what ended in a shard before the others spoke is ended in them; all are in step, and the step is lent."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(3, 6, 10.0)
        assert one.leases
        assert other.leases
        other.hush()
        async with another(coordinator, one, other) as again:
            await until(lambda: again.members.by_id["s0"].inside)
            await one.give_back(batch["batch_id"])
            other.speak()
            await again.ready()
            assert one.leases == other.leases == {}
            with pytest.raises(Conflict):
                await again.ack(batch["batch_id"])
            assert len(ids(await again.take_batch(3, 6, 10.0))) == 6


@virtual
async def test_a_lost_shard_with_a_part_holds_no_other() -> None:
    """P12: a batch of which a part is in a lost shard waits for that one; who has the rest is in step meanwhile."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(3, 6, 10.0)
        other.hush()
        async with another(coordinator, one, other) as again:
            await until(lambda: again.members.by_id["s0"].inside)
            one.die()
            other.speak()
            await until(lambda: again.members.by_id["s1"].inside)
            one.rise()
            await again.ready()
            assert ids(await again.take_batch(3, 6, 10.0)) == ids(batch)


@virtual
async def test_a_shard_that_owes_many_has_one_deadline_for_all() -> None:
    """P8: what a slow shard is still to be told of many batches takes it no longer than one answer may."""
    async with staged(2) as (coordinator, one, _other):
        member = coordinator.members.by_id["s0"]
        member.owed.update({f"old{number}-1": "ack" for number in range(20)})
        one.delay_s = 1.0
        began = asyncio.get_running_loop().time()
        await coordinator.batches.debts.pay(member)
        assert not member.owed
        assert asyncio.get_running_loop().time() - began <= 2.0


@virtual
async def test_a_take_without_patience_puts_no_shard_out_of_step() -> None:
    """P12, P22: who asks again without time to wait gets the batch after a shard's return, and holds nobody by it."""
    async with staged() as (coordinator, _, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        other.die()
        other.rise()
        await until(lambda: coordinator.members.by_id["s1"].life == other.life and not coordinator.members.outside)
        assert ids(await coordinator.take_batch(0, 6, 0.0)) == ids(batch)
        assert not coordinator.members.outside


@virtual
async def test_a_checkpoint_says_which_acks_came_too_late() -> None:
    """P1: an ack after its lease does not fail a checkpoint: it is named, as it is by one service."""
    async with staged(buffer={"path": "journal.db", "lease_s": 2.0}) as (coordinator, *shards):
        batch = await coordinator.take_batch(0, 6, 10.0)
        await until(lambda: not any(shard.leases for shard in shards))
        record = await coordinator.checkpoint("/snapshot", 1, [batch["batch_id"]])
        assert record["ack_expired"] == [batch["batch_id"]]
        assert "ack_expired" not in await coordinator.checkpoint("/snapshot", 1)
