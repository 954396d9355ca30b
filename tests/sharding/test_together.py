"""A coordinator over real services: each prompt is answered once, whichever shard it went to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError, NotNow
from rollout_svc.outside import Outside
from rollout_svc.service import RolloutService
from rollout_svc.sharding.book import kept_book
from rollout_svc.sharding.coordinator import Coordinator
from rollout_svc.sharding.local import LocalShard
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.shares import home_of
from rollout_svc.sharding.split import split
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import lines, make_config

GROUPS = 4


def settings(engines: list[FakeSGLang], folder: Path, **sections: Any) -> dict[str, Any]:
    """A configuration of two shards."""
    trainer = {"train_batch_size": GROUPS, "over_sample_threshold": 0.5, "max_staleness": 20}  # nothing is to expire
    given = make_config(*engines, trainer=trainer, **sections)
    changed = {"cluster": {"kind": "ray"}, "buffer": {"path": str(folder / "journal")}}
    whole = given.model_dump(mode="json", exclude_unset=True) | changed
    whole["producer"] = {"strategy": "async", "shards": 2}
    return whole


class FrailShard(LocalShard):
    """A shard that is lost to its coordinator when it is told to be.

    Attributes:
        lost: it is.
    """

    lost = False

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        if self.lost:
            raise ShardLost(f"shard {self.shard_id} is gone")
        return await super().call(name, given)


@asynccontextmanager
async def together(config: dict[str, Any], days: float = 0.0) -> AsyncIterator[Coordinator]:
    """Run the shards of a configuration in this process, and who coordinates them; so many days from now."""
    whole = config_from_mapping(config)
    parts = split(whole)
    outside = Outside(wall=lambda: time.time() + days * 86_400)
    shards = [FrailShard.of(part, outside=outside) for part in parts]
    async with kept_book(whole) as book, _running(Coordinator(whole, shards, book=book), shards) as coordinator:
        yield coordinator


@asynccontextmanager
async def _running(coordinator: Coordinator, shards: Sequence[LocalShard]) -> AsyncIterator[Coordinator]:
    try:
        for shard in shards:
            await shard.service.start()
        await asyncio.gather(*(shard.service.ready() for shard in shards))
        await coordinator.start()
        await coordinator.ready()
        yield coordinator
    finally:
        await coordinator.stop()
        await asyncio.gather(*(shard.service.stop() for shard in shards))


@pytest.fixture
async def engines() -> Any:
    """Yield two engines that answer at once."""
    async with FakeSGLang(weight_version="0") as one, FakeSGLang(weight_version="0") as two:
        for engine in (one, two):
            engine.answer = lambda call: Reply(tokens=[call.prompt_ids[-1]])
        yield [one, two]


def balanced(status: dict[str, Any]) -> dict[str, int]:
    """The groups of a ledger that sums."""
    groups: dict[str, int] = status["ledger"]["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    return groups


async def test_a_file_is_answered_once_over_all_shards(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """Batch after batch until the file has ended, a pause and weights in between: each line is in one of them."""  # P1
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines(20))))
    config = settings(engines, tmp_path, prompts={"jsonl": str(path), "epochs": 1})
    given: list[str] = []
    async with together(config) as both:
        for step in range(5):
            batch = await both.take_batch(step, GROUPS, 20.0)
            assert len(batch["groups"]) == GROUPS
            given += [group["prompt"]["id"] for group in batch["groups"]]
            await both.ack(batch["batch_id"])
            report = await both.pause(deadline_s=2.0)
            assert report.clean
            await both.update_weights(step + 1, {"kind": "external"})
            await both.resume()
            assert sum(balanced(await both.status()).values()) <= 2 * 20
        assert sorted(given) == sorted(f"p{number}" for number in range(20))
        with pytest.raises(NotNow) as told:
            await both.take_batch(5, GROUPS, 20.0)
        assert told.value.type == "exhausted"
        assert balanced(await both.status())["consumed"] == 20
    assert all(engine.calls for engine in engines), "each shard had its share"


async def test_what_was_pushed_survives_all_of_them(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """All shards and their coordinator end, and begin anew: groups and ids are known, none twice."""  # P31
    config = settings(engines, tmp_path)
    async with together(config) as both:
        assert await both.put_prompts("t", lines(8)) == {"accepted": 8}
        first = await both.take_batch(0, GROUPS, 20.0)
        await both.ack(first["batch_id"])
    async with together(config) as both:
        assert await both.put_prompts("t", lines(8)) == {"accepted": 0}
        rest = await both.take_batch(1, GROUPS, 20.0)
        given = [group["prompt"]["id"] for batch in (first, rest) for group in batch["groups"]]
        assert sorted(given) == sorted(f"p{number}" for number in range(8))


async def test_a_lease_survives_its_coordinator(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """Whoever coordinates, the same step gives the same batch while its parts are leased."""  # P31
    config = settings(engines, tmp_path)
    async with together(config) as both:
        await both.put_prompts("t", lines(8))
        first = await both.take_batch(0, GROUPS, 20.0)
    async with together(config) as both:
        again = await both.take_batch(0, GROUPS, 20.0)
        assert (again["batch_id"], again["groups"]) == (first["batch_id"], first["groups"])


async def test_an_owed_ack_holds_for_days(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """P1: acknowledged while its only shard was lost, a batch is consumed when all begin anew, much later."""
    config = settings(engines, tmp_path)
    prompts = [line for line in lines(40) if home_of("t", line["id"], 2) == 1][:2]
    async with together(config) as both:
        assert await both.put_prompts("t", prompts) == {"accepted": 2}
        batch = await both.take_batch(0, 2, 20.0)
        lost: Any = both.members.by_id["s1"].shard
        lost.lost = True
        with pytest.raises(NotNow, match="is acknowledged, and consumed when its shards return"):
            await both.ack(batch["batch_id"])
    async with together(config, days=30.0) as both:
        assert (await both.ack(batch["batch_id"]))["acknowledged"]
        groups = balanced(await both.status())
        assert (groups["consumed"], groups["ready"], groups["leased"]) == (2, 0, 0)


async def test_a_service_in_process_has_no_shards(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """What would be one loop where several were asked for is refused."""  # P35
    service = RolloutService(config_from_mapping(settings(engines, tmp_path)))
    with pytest.raises(ConfigError, match=r"producer\.shards"):
        await service.start()
    await service.stop()
