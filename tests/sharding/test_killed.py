"""Histories in which coordinators are killed as well as shards: what was acknowledged is trained on once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import pytest

from rollout_svc.errors import NotNow, ServiceError
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import config_of, until
from tests.sharding.test_histories import History
from tests.support.memory_notes import MemoryNotes
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual

SEEDS = range(25)


class Killed(History):
    """One trainer, whose coordinators are killed; a book and the shards' journals are all that is left."""

    def __init__(self, seed: int, notes: MemoryNotes, shards: tuple[MemoryShard, ...]) -> None:
        self.notes = notes
        self.names = count()
        self.accepted: set[str] = set()
        super().__init__(seed, self.born(shards), shards)

    def born(self, shards: tuple[MemoryShard, ...]) -> Coordinator:
        """The next coordinator."""
        config = config_of(buffer={"path": "journal.db", "lease_s": 8.0}, start_timeout_s=2.0)
        return Coordinator(config, shards, book=self.notes.book(), new_id=lambda: f"b{next(self.names)}")

    async def act(self) -> None:
        acts = (self.take, self.take, self.ack, self.carry, self.rest, self.slow, self.kill)
        await self.rng.choice((*acts, self.lose, self.return_, self.hush, self.speak))()
        self.check()

    async def ack(self) -> None:
        """Acknowledge something; that it waits for a shard is as good as that it is done."""
        if self.lent:
            batch_id = self.rng.choice(sorted(self.lent))
            try:
                await self.coordinator.ack(batch_id)
            except NotNow as told:
                if "is acknowledged" in told.message:
                    self.accepted.add(batch_id)
            except ServiceError:
                assert batch_id not in self.accepted, "P1: an accepted ack holds"
            else:
                self.accepted.add(batch_id)
                self.step += 1

    async def carry(self) -> None:
        """Acknowledge with a take, as trainers do."""
        if self.lent:
            batch_id = self.rng.choice(sorted(self.lent))
            self.step += 1
            with suppress(ServiceError):
                batch = await self.coordinator.take_batch(self.step, 1, 3.0, ack=[batch_id])
                self.lent[batch["batch_id"]] = [group["group_id"] for group in batch["groups"]]
                if batch_id in batch.get("ack_expired", ()):
                    assert batch_id not in self.accepted, "P1: an accepted ack holds"
                else:
                    self.accepted.add(batch_id)

    async def rest(self) -> None:
        await asyncio.sleep(self.rng.choice((0.1, 12.0)))  # longer than a lease

    async def kill(self) -> None:
        """End the coordinator without a word, and begin another."""
        await self.end_coordinator()
        self.coordinator = self.born(self.shards)
        await self.coordinator.start()
        with suppress(NotNow):
            await self.coordinator.ready()

    async def end_coordinator(self) -> None:
        """End it without a word."""
        self.coordinator.batches.close()
        await self.coordinator._tasks.close(asyncio.get_running_loop().time())

    async def end(self) -> None:
        """All return, and every accepted ack is asked again: it is done."""
        await asyncio.sleep(1.0)  # whoever is to be lost by then is
        for shard in self.shards:
            shard.delay_s = 0.001
            shard.speak()
            if shard.lost:
                shard.rise()
        await until(lambda: not self.coordinator.members.outside, 60.0)
        for batch_id in sorted(self.accepted):
            assert (await self.coordinator.ack(batch_id))["acknowledged"]
        trained = [name for batch_id in self.accepted for name in self.lent[batch_id]]
        assert len(set(trained)) == len(trained), "P1: none twice"
        consumed = {name for shard in self.shards for name, account in shard.accounts.items() if account == "consumed"}
        assert set(trained) <= consumed, "P1: none lost"
        await asyncio.sleep(60.0)
        left = {batch_id for shard in self.shards for batch_id in shard.leases}
        assert left == set(), "every lease has ended"
        await self.notes.flush()
        assert self.notes.rows == 0, "what is settled is removed"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_accepted_ack_holds_whoever_is_killed(seed: int) -> None:
    """P1, P31 on histories that kill coordinators and shards, with leases that run out meanwhile."""

    @virtual
    async def history() -> None:
        notes = MemoryNotes(3)
        shards = tuple(MemoryShard(f"s{index}") for index in range(3))
        for shard in shards:
            shard.start()
        made = Killed(seed, notes, shards)
        try:
            await made.coordinator.start()
            await made.coordinator.ready()
            for _ in range(40):
                await made.act()
            await made.end()
        finally:
            await made.end_coordinator()
            for shard in shards:
                await shard.close()

    history()
