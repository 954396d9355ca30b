"""Routed experts of a batch that lies in several shards: where they lie, until when, and over HTTP."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest

from rollout_svc.errors import NotFound, NotNow, SpentHandle
from rollout_svc.heavy import Heavy
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.parts import Part
from rollout_svc.packing.reading import experts_of
from rollout_svc.rpc.client import RolloutClient
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService
from rollout_svc.sharding.batch import MergedBatch
from rollout_svc.sharding.coordinator import Coordinator
from rollout_svc.sharding.local import LocalLease, LocalShard
from rollout_svc.sharding.protocol import Leased, ShardLost
from tests.sharding.test_together import settings, together
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.routing import TINY
from tests.support.stage import lines

GROUPS = 4
MODEL = {"enabled": True, "num_experts": 8, "top_k": 2, "layers": 4, "moe_layers": [1, 2, 3]}


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeSGLang]]:
    """Yield two engines with experts that answer at once."""
    async with (
        FakeSGLang(weight_version="0", experts=TINY) as one,
        FakeSGLang(weight_version="0", experts=TINY) as two,
    ):
        for engine in (one, two):
            engine.answer = lambda call: Reply(tokens=[call.prompt_ids[-1], 7])
        yield [one, two]


@pytest.fixture
async def both(engines: list[FakeSGLang], tmp_path: Path) -> AsyncIterator[Coordinator]:
    """Yield a coordinator over two shards, each with groups that are ready; at the end no handle is alive."""
    async with together(settings(engines, tmp_path, experts=MODEL)) as coordinator:
        await coordinator.put_prompts("t", lines(2 * GROUPS))
        yield coordinator
        services = services_of(coordinator)
    for service in services:
        assert service.parts.handles.live == {}
        assert service.parts.handles.lost == {}


def services_of(coordinator: Coordinator) -> list[RolloutService]:
    """The services behind it."""
    return [cast("LocalShard", member.shard).service for member in coordinator.members.all]


def leased(coordinator: Coordinator) -> int:
    """Samples with routed experts that are leased, in all shards."""
    leases = [lease for service in services_of(coordinator) for lease in service.parts.buffer.leases]
    samples = [sample for lease in leases for group in lease.groups for sample in group.samples]
    return sum(sample.experts is not None for sample in samples)


def expected(record: dict[str, Any]) -> dict[str, Any]:
    """What each sample of a batch has to have."""
    samples = [sample for group in record["groups"] for sample in group["samples"]]
    return {sample["sample_id"]: TINY.rows(sample["prompt_ids"] + sample["response_ids"]) for sample in samples}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Every sample has its own."""
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        np.testing.assert_array_equal(found[name], rows)


async def test_every_sample_of_every_shard_has_its_own(both: Coordinator) -> None:
    """P27: read where they lie until the ack of the whole, which releases them in each shard; back with a lease."""
    batch = await both.lease_batch(0, GROUPS, 20.0)
    assert len(batch.parts) == 2
    handles = await batch.experts()
    wanted = expected(await batch.as_json())
    same({name: heavy.read() for name, heavy in handles.items()}, wanted)
    await both.ack(batch.batch_id)
    for heavy in handles.values():
        with pytest.raises(SpentHandle):
            heavy.read()
    assert leased(both) == 0
    after = await both.lease_batch(1, GROUPS, 20.0)
    owned = {name: heavy.nbytes for name, heavy in (await after.experts()).items()}
    assert len(owned) == leased(both) == GROUPS
    for service in services_of(both):
        await service.parts.batches.give_back(after.batch_id)
    held = sum(tally.handles for service in services_of(both) for tally in service.parts.handles.live.values())
    assert held == GROUPS, "they went back with their groups"


async def test_a_batch_is_had_as_tensors_over_http(both: Coordinator) -> None:
    """P27: one body, padded over all shards, routed experts in it; and one sample at a time beside the JSON."""
    async with serve_http(cast("RolloutService", both)) as url, RolloutClient(url) as client:
        record = await client.take_batch(0, GROUPS, timeout_s=20.0, ack=None)
        wanted = expected(record)
        same(await client.take_experts(record), wanted)
        packed = await client.take_batch(0, GROUPS, timeout_s=20.0, ack=None, tensors=True)
        assert packed["batch_id"] == record["batch_id"]
        same(await client.take_experts(packed), wanted)
        same(experts_of(packed), wanted)
        samples = [sample for group in record["groups"] for sample in group["samples"]]
        assert [one["sample_id"] for one in packed["samples"]] == [one["sample_id"] for one in samples]
        assert packed["tensors"]["group_ids"].tolist() == list(range(GROUPS))
        for row, sample in zip(packed["tensors"]["input_ids"].tolist(), samples, strict=True):
            tokens = sample["prompt_ids"] + sample["response_ids"]
            assert row[: len(tokens)] == tokens
        with pytest.raises(NotFound, match="no batch that is lent"):
            await both.experts_of("nobody.0")
        await client.ack(record["batch_id"])
        with pytest.raises(NotFound, match="no batch that is lent"):
            await client.take_experts(record)


class Gone:
    """What was leased from a shard that is away."""

    def __init__(self, part: Leased) -> None:
        self.count = part.count
        self.metrics = part.metrics

    async def records(self) -> Sequence[bytes]:
        raise ShardLost("shard s1 is gone")

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        raise ShardLost("shard s1 is gone")

    async def part(self) -> Part:
        raise ShardLost("shard s1 is gone")


async def test_a_shard_that_is_lost_is_asked_for_again(both: Coordinator) -> None:
    """P31: what cannot be read now is a 503 that says so, in each form; the lease stays, and the next take has it."""
    async with serve_http(cast("RolloutService", both)) as url, RolloutClient(url) as client:
        record = await client.take_batch(0, GROUPS, timeout_s=20.0, ack=None)
        (lent,) = both.batches.lent
        away = lent.parts["s1"]
        theirs = await away.experts()
        assert 0 < len(theirs) < GROUPS
        lent.parts["s1"] = Gone(away)
        for tensors in (False, True):
            with pytest.raises(NotNow, match="is leased, and cannot be read now"):
                await client.take_batch(0, GROUPS, timeout_s=20.0, ack=None, tensors=tensors)
        for name in expected(record):
            if name in theirs:
                with pytest.raises(NotNow, match="cannot be read now"):
                    await both.experts_of(name)
            else:
                assert (await both.experts_of(name)).nbytes > 0
        lent.parts["s1"] = away
        again = await client.take_batch(0, GROUPS, timeout_s=20.0, ack=None, tensors=True)
        same(experts_of(again), expected(record))


class Answer:
    """What one part answers with: watched, for whoever may keep it."""


async def test_nobody_keeps_what_came_before_an_error() -> None:
    """P27: where one part is away, what the others answered goes with the error, and waits for no collector."""

    class There(Gone):
        async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
            answer = Answer()
            kept.append(weakref.ref(answer))
            return cast("Mapping[str, Heavy]", {"s": answer})

        async def part(self) -> Part:
            answer = Answer()
            kept.append(weakref.ref(answer))
            return cast("Part", (answer,))

    kept: list[weakref.ref[Answer]] = []
    none = LocalLease(None)
    batch = MergedBatch("b-2", 0, {"s0": There(none), "s1": Gone(none), "s2": There(none)}, {}, {}, 1.0)
    gc.disable()
    try:
        for asked in (batch.experts, batch.to_pack):
            with suppress(ShardLost):
                await asked()
        await asyncio.sleep(0)
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


async def test_a_sample_without_any_says_so(engines: list[FakeSGLang], tmp_path: Path) -> None:
    """P28: an evaluation asks for none, whatever the settings; where training has none either it is a 404 by name."""
    async with together(settings(engines, tmp_path, experts=MODEL)) as both:
        prompts = [{key: line[key] for key in ("id", "input_ids")} for line in lines(2)]
        await both.evaluate("t", prompts, timeout_s=20.0)
        assert not any(service.parts.handles.made for service in services_of(both))
    plain = settings(engines, tmp_path / "plain")
    (tmp_path / "plain").mkdir()
    async with together(plain) as both, serve_http(cast("RolloutService", both)) as url:
        await both.put_prompts("t", lines(GROUPS))
        batch = await both.lease_batch(0, GROUPS, 20.0)
        assert await batch.experts() == {}
        name = next(iter(expected(await batch.as_json())))
        with pytest.raises(NotFound) as told:
            await both.experts_of(name)
        assert told.value.type == "no_experts"
        async with aiohttp.ClientSession() as session:
            sent = {"step": 0, "groups": GROUPS}
            async with session.post(url + "/v1/batches", json=sent, headers={"Accept": MEDIA_TYPE}) as answer:
                assert (answer.status, answer.content_type) == (200, MEDIA_TYPE)
                assert b"routed_experts" not in await answer.read()
