"""What a coordinator has promised holds although it is killed, and a shard with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_svc.errors import Conflict, NotNow
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import check_books, config_of, until
from tests.support.memory_notes import MemoryNotes
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual


def ids(batch: dict[str, Any]) -> list[str]:
    """The groups of a batch."""
    return [group["group_id"] for group in batch["groups"]]


def consumed(*shards: MemoryShard) -> list[str]:
    """What was trained on."""
    return [name for shard in shards for name, account in shard.accounts.items() if account == "consumed"]


class Lives:
    """Coordinators one after the other, over the same two shards and the same book."""

    def __init__(self, lease_s: float) -> None:
        self.notes = MemoryNotes()
        self.shards = MemoryShard("s0"), MemoryShard("s1")
        self._config = config_of(buffer={"path": "journal.db", "lease_s": lease_s})
        self._born = 0
        self.now: Coordinator

    async def begin(self) -> Coordinator:
        """Have a coordinator, which is not in step yet."""
        self._born += 1
        names = (f"life{self._born}.{number}" for number in range(1000))
        self.now = Coordinator(self._config, self.shards, book=self.notes.book(), new_id=lambda: next(names))
        await self.now.start()
        return self.now

    async def kill(self) -> None:
        """End it without a word: nobody is told anything."""
        self.now.batches.close()
        await self.now._tasks.close(asyncio.get_running_loop().time())


@asynccontextmanager
async def lives(lease_s: float = 100.0) -> AsyncIterator[tuple[Lives, MemoryShard, MemoryShard]]:
    """Give the first of them, ready, with groups for whatever comes in both shards."""
    made = Lives(lease_s)
    one, other = made.shards
    for shard in made.shards:
        shard.start()
    try:
        await (await made.begin()).ready()
        await until(lambda: len(one.ready) > 8 and len(other.ready) > 8)
        one.pace_s = other.pace_s = 1000.0
        await asyncio.sleep(0.2)
        yield made, one, other
    finally:
        await made.kill()
        for shard in made.shards:
            await shard.close()


async def only_in(shard: MemoryShard, coordinator: Coordinator, step: int) -> dict[str, Any]:
    """Lend a batch of which all is in one shard: the other is away meanwhile."""
    away = next(member for member in coordinator.members.all if member.shard is not shard)
    lost: Any = away.shard
    away.fall("for the test")
    lost.refuses["status"] = NotNow("starting", "for the test")
    batch = await coordinator.take_batch(step, 4, 10.0)
    lost.refuses.clear()
    assert {name.partition(":")[0] for name in ids(batch)} == {shard.shard_id}
    await coordinator.ready()
    return batch


@pytest.mark.parametrize("how", ["by itself", "with a take"])
def test_an_ack_outlives_coordinator_and_shard(how: str) -> None:
    """P1, P31: accepted while the only shard with a part is lost, the ack holds in the next life: nothing twice."""

    @virtual
    async def history() -> None:
        async with lives(lease_s=5.0) as (made, one, other):
            batch = await only_in(other, made.now, 0)
            other.die()
            if how == "by itself":
                with pytest.raises(NotNow, match="is acknowledged, and consumed when its shards return"):
                    await made.now.ack(batch["batch_id"])
            else:
                after = await made.now.take_batch(1, 2, 10.0, ack=[batch["batch_id"]])
                assert "ack_expired" not in after
            await made.kill()
            again = await made.begin()
            with pytest.raises(NotNow):
                await again.ack(batch["batch_id"])
            other.rise()
            await again.ready()
            assert set(ids(batch)) <= set(consumed(one, other))
            assert (await again.ack(batch["batch_id"]))["acknowledged"]
            await asyncio.sleep(60.0)
            trained = ids(batch)
            for step in range(2, 5):
                trained += ids(taken := await again.take_batch(step, 2, 10.0))
                await again.ack(taken["batch_id"])
            assert len(set(trained)) == len(trained)
            check_books(again)
            await made.notes.flush()
            assert made.notes.rows == 0, "what is paid is removed"

    history()


@virtual
async def test_an_ack_holds_where_both_shards_were_lost() -> None:
    """P1: owed by both, it is paid by each as it returns, whichever comes first."""
    async with lives() as (made, one, other):
        batch = await made.now.take_batch(0, 6, 10.0)
        one.die()
        other.die()
        with pytest.raises(NotNow):
            await made.now.ack(batch["batch_id"])
        await made.kill()
        again = await made.begin()
        other.rise()
        await until(lambda: again.members.by_id["s1"].inside)
        with pytest.raises(NotNow, match="s0"):
            await again.ack(batch["batch_id"])
        one.rise()
        await again.ready()
        assert (await again.ack(batch["batch_id"]))["acknowledged"]
        assert sorted(consumed(one, other)) == sorted(ids(batch))


@virtual
async def test_an_ack_that_cannot_be_noted_is_not_accepted() -> None:
    """P1, P23: where the book cannot be written nobody is told that an ack will hold, however it is asked for."""
    async with lives() as (made, _, other):
        batch = await only_in(other, made.now, 0)
        other.die()
        made.notes.broken = True
        for _ in range(2):
            with pytest.raises(NotNow, match="on holiday"):
                await made.now.take_batch(1, 2, 10.0, ack=[batch["batch_id"]])


@virtual
async def test_a_step_is_lent_once_over_two_coordinators() -> None:
    """P22, P31: a step whose batch is in a shard that has not returned is not lent again; then it is given."""
    async with lives() as (made, _, other):
        batch = await only_in(other, made.now, 3)
        other.die()
        await made.kill()
        again = await made.begin()
        await until(lambda: again.members.by_id["s0"].inside)
        with pytest.raises(NotNow, match="step 3 was lent before, and its batch is looked for in the shards: s1: "):
            await again.take_batch(3, 4, 2.0)
        assert len(ids(await again.take_batch(4, 2, 10.0))) == 2, "another step does not wait"
        other.rise()
        await again.ready()
        assert ids(await again.take_batch(3, 4, 10.0)) == ids(batch)


@virtual
async def test_a_step_whose_batch_is_nowhere_is_lent_anew() -> None:
    """P22: what was noted and never leased, or has ended in the shards, holds up its step no longer than needed."""
    async with lives() as (made, _, other):
        batch = await only_in(other, made.now, 3)
        await made.kill()
        await other.give_back(batch["batch_id"])
        again = await made.begin()
        await again.ready()
        anew = await again.take_batch(3, 4, 10.0)
        assert anew["batch_id"] != batch["batch_id"]
        await again.ack(anew["batch_id"])
        await made.notes.flush()
        assert made.notes.rows == 0


@virtual
async def test_what_is_to_be_given_back_outlives_the_coordinator() -> None:
    """P1: a batch that expired while its shard was lost is not lent again by the next coordinator; it goes back."""
    async with lives(lease_s=2.0) as (made, one, other):
        batch = await only_in(other, made.now, 3)
        other.die()
        await asyncio.sleep(3.0)
        with pytest.raises(Conflict):
            await made.now.ack(batch["batch_id"])
        await made.kill()
        again = await made.begin()
        other.rise()
        await again.ready()
        assert one.leases == other.leases == {}
        with pytest.raises(Conflict):
            await again.ack(batch["batch_id"])


@virtual
async def test_an_ack_that_was_answered_to_nobody_is_remembered() -> None:
    """P31: consumed just before the coordinator was killed, a batch is acknowledged to who asks the next one."""
    async with lives() as (made, one, _):
        batch = await made.now.take_batch(0, 6, 10.0)
        await made.now.ack(batch["batch_id"])
        gone = await made.now.take_batch(1, 4, 10.0)
        await made.now.batches.debts.give_back(gone["batch_id"], made.now.members.all)
        await made.kill()
        again = await made.begin()
        await again.ready()
        one.hush()
        with pytest.raises(NotNow):
            await again.ack("never.1-6")
        assert (await again.ack(batch["batch_id"]))["acknowledged"]
        one.speak()
        await until(lambda: not again.members.outside)
        after = await again.take_batch(2, 2, 10.0, ack=[batch["batch_id"], gone["batch_id"], "never.1-6"])
        assert after["ack_expired"] == [gone["batch_id"], "never.1-6"]


@virtual
async def test_what_is_being_given_back_is_not_lent_again() -> None:
    """P1: whoever was told that a lease has ended is right, also where the coordinator is killed before the shards."""
    async with lives(lease_s=2.0) as (made, one, other):
        batch = await only_in(other, made.now, 3)
        other.hush()
        await asyncio.sleep(2.1)  # it has ended, and the shard has not said yet that it knows
        with pytest.raises(Conflict):
            await made.now.ack(batch["batch_id"])
        await made.kill()
        again = await made.begin()
        other.speak()
        await again.ready()
        with pytest.raises(Conflict):
            await again.ack(batch["batch_id"])
        assert one.leases == other.leases == {}
