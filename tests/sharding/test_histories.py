"""Histories with losses, slow and silent shards: what holds in each of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from rollout_svc.errors import ServiceError
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import DISK, check_books, staged, until
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual

SEEDS = range(60)


class History:
    """One trainer, and what befalls its shards."""

    def __init__(self, seed: int, coordinator: Coordinator, shards: tuple[MemoryShard, ...]) -> None:
        self.rng = Random(seed)
        self.coordinator = coordinator
        self.shards = shards
        self.step = 0
        self.version = 0
        self.lent: dict[str, list[str]] = {}
        self.acked: dict[str, list[str]] = {}
        self.ticket = 0

    async def act(self) -> None:
        """Do one thing, and look whether all is well."""
        acts = (self.take, self.take, self.ack, self.ack, self.pause, self.resume, self.resume, self.update, self.rest)
        await self.rng.choice((*acts, self.lose, self.return_, self.hush, self.speak, self.slow))()
        self.check()

    async def take(self) -> None:
        with suppress(ServiceError):
            batch = await self.coordinator.take_batch(self.step, self.rng.randint(1, 6), self.rng.choice((0.3, 3.0)))
            names = [group["group_id"] for group in batch["groups"]]
            assert self.lent.setdefault(batch["batch_id"], names) == names, "the same batch has the same groups"
            assert len(set(names)) == len(names) == batch["metrics"]["groups"]

    async def ack(self) -> None:
        if self.lent:
            batch_id = self.rng.choice(sorted(self.lent))
            with suppress(ServiceError):
                await self.coordinator.ack(batch_id)
                self.acked[batch_id] = self.lent[batch_id]
                self.step += 1

    async def pause(self) -> None:
        loop, deadline = asyncio.get_running_loop(), self.rng.choice((0.2, 1.0))
        began = loop.time()
        asked = [
            asyncio.ensure_future(self.coordinator.pause(deadline_s=deadline)) for _ in range(self.rng.randint(1, 2))
        ]
        reports = await asyncio.gather(*asked)
        assert loop.time() - began <= deadline + 0.1, "P8"
        assert len({report.ticket for report in reports}) == 1, "P11"
        report = reports[0].as_json()
        named = {row["worker"].partition(".")[0] for row in report["abandoned"]}
        for shard in self.shards:
            assert not shard.open or shard.shard_id in named, "P9: who is not stopped is named"
        assert report["clean"] == (not named)
        assert self.coordinator.state == "paused"
        self.ticket = report["ticket"]

    async def resume(self) -> None:
        with suppress(ServiceError):
            await self.coordinator.resume()
            with pytest.raises(ServiceError):
                await self.coordinator.pause(if_ticket=self.ticket - 1)  # P11: a late pause leaves it running
            assert self.coordinator.state == "running"

    async def update(self) -> None:
        self.version = max(self.version, self.coordinator.weights.version) + 1
        if self.rng.random() < 0.3:
            self.rng.choice(self.shards).refuses[f"load:{self.version}"] = Exception()
        with suppress(ServiceError):
            await self.coordinator.update_weights(self.version, DISK, {"deadline_s": 0.5})

    async def rest(self) -> None:
        await asyncio.sleep(self.rng.choice((0.1, 2.0)))

    async def lose(self) -> None:
        self.later(self.rng.choice(self.shards).die)

    async def return_(self) -> None:
        for shard in self.shards:
            if shard.lost:
                shard.rise()

    async def hush(self) -> None:
        self.later(self.rng.choice(self.shards).hush)

    async def speak(self) -> None:
        for shard in self.shards:
            shard.speak()

    async def slow(self) -> None:
        self.rng.choice(self.shards).delay_s = self.rng.choice((0.001, 0.03, 0.3))

    def later(self, what: Any) -> None:
        """In the middle of whatever comes next."""
        asyncio.get_running_loop().call_later(self.rng.choice((0.0, 0.002, 0.02, 0.3)), what)

    def check(self) -> None:
        """What holds at every moment."""
        check_books(self.coordinator)
        for member in self.coordinator.members.inside:
            shard = next(shard for shard in self.shards if shard.shard_id == member.shard_id)
            if shard.open and shard.life == member.life and self.coordinator.weights.updating is None:
                assert shard.version == self.coordinator.weights.version, "P24"

    async def end(self) -> None:
        """All return: what was taken and acknowledged is consumed, once, and nothing else is."""
        await asyncio.sleep(1.0)
        for shard in self.shards:
            shard.delay_s = 0.001
            shard.refuses.clear()
            shard.speak()
            if shard.lost:
                shard.rise()
        coordinator = self.coordinator
        await until(lambda: coordinator.weights.updating is None, 60.0)
        await coordinator.resume()
        await until(lambda: not coordinator.members.outside and all(shard.open for shard in self.shards), 60.0)
        for batch_id in list(self.lent):
            with suppress(ServiceError):
                await coordinator.ack(batch_id)
                self.acked[batch_id] = self.lent[batch_id]
        await asyncio.sleep(1.0)
        trained = [name for names in self.acked.values() for name in names]
        assert len(set(trained)) == len(trained), "P1: none twice"
        consumed = {name for shard in self.shards for name, account in shard.accounts.items() if account == "consumed"}
        assert consumed == set(trained), "P1: none lost"
        assert sum(shard.made for shard in self.shards) == sum(len(shard.accounts) for shard in self.shards)
        assert {batch_id for shard in self.shards for batch_id in shard.leases} == set()
        assert (await coordinator.status())["ledger"]["groups"]["consumed"] == len(trained)
        check_books(coordinator)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_keeps_its_promises(seed: int) -> None:
    """P1, P2, P8, P9, P11, P24 on histories with random losses, slow and silent shards; all comes back into step."""

    @virtual
    async def history() -> None:
        on_failure = ("stop", "rollback", "quarantine")[seed % 3]
        async with staged(3, weights={"on_failure": on_failure}) as (coordinator, *shards):
            made = History(seed, coordinator, tuple(shards))
            for _ in range(40):
                await made.act()
            await made.end()

    history()
