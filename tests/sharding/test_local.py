"""A service that is a shard: held until it is told, leasing under another's ids, its share of the prompts alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout_svc.config import Portion
from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.sharding.local import LocalShard, records
from rollout_svc.sharding.protocol import Shard
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import Stage, lines, stage

PART = Portion(0, 2)


@pytest.fixture
async def engine() -> Any:
    """Yield an engine that answers at once."""
    async with FakeSGLang(weight_version="0") as made:
        made.answer = lambda call: Reply(tokens=[call.prompt_ids[-1]])
        yield made


def shard(made: Stage) -> Shard:
    """The service of a stage, behind the protocol."""
    return LocalShard("s0", made.service)


async def opened(made: Stage) -> Shard:
    """The same, told to begin as its coordinator does."""
    await made.service.pause()
    await made.service.resume()
    return shard(made)


async def test_a_shard_starts_held(engine: FakeSGLang) -> None:
    """Nothing starts before somebody resumes it; a pause finds it stopped already, and weights may be loaded."""  # P9
    async with stage(engine, pushed=2, portion=PART) as made:
        assert made.service.state == "paused"
        report = await made.service.pause()
        assert (report.clean, report.ticket) == (True, 0)
        update = await made.service.update_weights(1, {"kind": "external"})
        assert update["version"] == 1
        assert made.groups("admitted") == 0
        await made.service.resume()
        await made.until(lambda: made.groups("ready") == 2)
        assert (await made.service.pause()).ticket == 1


async def test_a_service_that_is_no_shard_opens_by_itself(engine: FakeSGLang) -> None:
    """A configuration without shards starts as ever."""
    async with stage(engine, pushed=1) as made:
        assert made.service.state == "running"


async def test_what_is_ready_is_counted_and_leased_under_the_callers_id(engine: FakeSGLang) -> None:
    """A lease under an id is one: asked for again it has the same groups; more than is ready is not waited for."""
    async with stage(engine, pushed=3, portion=PART) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 3, 10.0) == 3
        leased = await mine.lease(0, 2, "b0.s0")
        assert leased.count == 2
        assert leased.metrics["groups"] == 2
        told = [orjson.loads(record) for record in await leased.records()]
        assert [record["prompt"]["id"] for record in told] == ["p0", "p1"]
        again = await mine.lease(0, 2, "b0.s0")
        assert await again.records() == await leased.records()
        assert made.groups("leased") == 2
        assert (await mine.lease(0, 4, "b1.s0")).count == 1
        none = await mine.lease(0, 4, "b2.s0")
        assert (none.count, list(await none.records())) == (0, [])
        assert await mine.call("ack", {"batch_id": "b0.s0"}) == {"batch_id": "b0.s0", "acknowledged": True}
        assert made.groups("consumed") == 2
        with pytest.raises(Conflict, match="acknowledged"):
            await mine.lease(0, 2, "b0.s0")


async def test_what_is_given_back_is_ready_again_and_first(engine: FakeSGLang) -> None:
    """A lease that its coordinator ends leaves its groups where they were; its id is spent, and twice is once."""  # P1
    async with stage(engine, pushed=3, portion=PART) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 3, 10.0) == 3
        first = await (await mine.lease(0, 2, "b0")).records()
        await mine.give_back("b0")
        await mine.give_back("b0")
        await mine.give_back("never")
        assert (made.groups("ready"), made.groups("leased")) == (3, 0)
        with pytest.raises(Conflict):
            await mine.lease(0, 2, "b0")
        assert await (await mine.lease(0, 2, "b1")).records() == first


async def test_who_reads_late_leases_nothing(engine: FakeSGLang) -> None:
    """The records of a lease are read while it is in force; after it nothing is lent in its name."""  # P1
    async with stage(engine, pushed=2, portion=PART) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 2, 10.0) == 2
        leased = await mine.lease(0, 2, "b0")
        assert records(made.service, "b0") == await leased.records()
        await mine.give_back("b0")
        for batch_id in ("b0", "of an earlier life"):
            with pytest.raises(Conflict):
                records(made.service, batch_id)
        assert (made.groups("ready"), made.groups("leased")) == (2, 0)


async def test_who_waits_for_groups_is_what_the_schedule_works_for(engine: FakeSGLang) -> None:
    """More than a batch is asked for: the schedule makes that many, and the wait ends with the last of them."""
    trainer = {"train_batch_size": 2, "max_staleness": 1}
    async with stage(engine, pushed=8, portion=PART, trainer=trainer, producer={"strategy": "sync"}) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 4, 10.0) == 4
        assert made.groups("admitted") == 4


async def test_who_has_no_time_only_looks(engine: FakeSGLang) -> None:
    """A look without time to wait says what is there, and the schedule makes nothing more for it."""
    trainer = {"train_batch_size": 2, "max_staleness": 1}
    async with stage(engine, pushed=8, portion=PART, trainer=trainer, producer={"strategy": "sync"}) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 2, 10.0) == 2
        batches = made.parts.batches
        before, asked = batches.demand, made.parts.producer.mixture.groups
        assert await mine.ready_groups(0, 6, 0.0) == 2
        assert (batches.demand, made.parts.producer.mixture.groups) == (before, asked)
        assert made.groups("admitted") == 2


async def test_a_wait_that_is_over_says_what_there_is(engine: FakeSGLang) -> None:
    """Fewer than wanted after the time is a number, not an error; while paused too."""  # P22
    async with stage(engine, pushed=1, portion=PART) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 1, 10.0) == 1
        assert await mine.ready_groups(0, 2, 0.05) == 1
        await made.service.pause()
        assert await mine.ready_groups(0, 2, 0.05) == 1


async def test_what_can_never_be_is_said_at_once(engine: FakeSGLang, tmp_path: Path) -> None:
    """Of a file that has ended no more will come: the wait ends with the reason, and what there is."""  # P22
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines(3))))
    prompts = {"jsonl": str(path), "shuffle": False, "epochs": 1}
    async with stage(engine, portion=Portion(0, 2), prompts=prompts) as made:
        mine = await opened(made)
        with pytest.raises(NotNow) as told:
            await mine.ready_groups(0, 3, 10.0)
        assert told.value.type == "exhausted"
        assert told.value.detail["ready"] == 2
        assert told.value.detail["can_be_met"] is False
        left = await (await mine.lease(0, 9, "b")).records()
        assert [orjson.loads(record)["prompt"]["id"] for record in left] == ["p0", "p2"]


async def test_a_wait_ends_when_the_service_does(engine: FakeSGLang) -> None:
    """A shard that stops fails who waits at it."""  # P23
    async with stage(engine, portion=PART) as made:
        mine = await opened(made)
        waiting = made.start(mine.ready_groups(0, 1, 30.0))
        await asyncio.sleep(0)
        await made.service.stop()
        with pytest.raises(NotNow, match="stopping"):
            await waiting


async def test_a_lease_survives_its_shard(engine: FakeSGLang, tmp_path: Path) -> None:
    """In its next life a shard has the lease under the same id, with the same records."""  # P31
    buffer = {"path": str(tmp_path / "journal.s0")}
    async with stage(engine, pushed=2, portion=PART, buffer=buffer) as made:
        mine = await opened(made)
        assert await mine.ready_groups(0, 2, 10.0) == 2
        before = await (await mine.lease(0, 2, "b0")).records()
    async with stage(engine, portion=PART, buffer=buffer) as made:
        assert made.service.state == "paused"
        assert await (await shard(made).lease(0, 2, "b0")).records() == before
        await shard(made).call("ack", {"batch_id": "b0"})
        assert made.groups("consumed") == 2


async def test_a_call_that_is_none_of_the_services_is_refused(engine: FakeSGLang) -> None:
    """What a coordinator may call is listed: nothing else of the object is reached."""
    async with stage(engine, portion=PART) as made:
        for name in ("stop", "_died", "parts"):
            with pytest.raises(BadRequest):
                await shard(made).call(name, {})
        assert (await shard(made).call("pause", {"deadline_s": 1.0}))["clean"] is True
        assert (await shard(made).call("status", {}))["state"] == "paused"
