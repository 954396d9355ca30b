"""Weights from a trainer to built-in engines through a gloo group, by way of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import NotNow
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.distributed import DistributedSender
from rollout_svc.workers.worker import WorkerState
from tests.embedded.helpers import Served, served, small_model
from tests.embedded.test_process import engine_process
from tests.support.bell import WAIT_S
from tests.support.stage import Stage, stage
from tests.weights.test_publish_policies import refuse_to_end

TIMEOUT_S = 3.0
BUCKET_BYTES = 4096


def url_of(engine: Served) -> str:
    """Where it is."""
    return str(engine.session._base_url)


def weights(engine: Served) -> dict[str, torch.Tensor]:
    """The engine's weights, copied."""
    return {name: parameter.detach().clone() for name, parameter in engine.scheduler.model.named_parameters()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def groups(engine: Served) -> tuple[str, ...]:
    """The groups that an engine is in."""
    return engine.engine._groups.names


@asynccontextmanager
async def trained(
    *engines: Served, bucket_bytes: int = BUCKET_BYTES, on_failure: str = "stop"
) -> AsyncIterator[tuple[Stage, WeightPublisher]]:
    """A stage over engines, and a publisher that broadcasts, and does not wait for long."""
    async with stage(*(url_of(engine) for engine in engines), weights={"on_failure": on_failure}) as made:
        sender = DistributedSender(bucket_bytes, timeout_s=TIMEOUT_S)
        async with WeightPublisher(made.service, way=sender, bucket_bytes=bucket_bytes) as publisher:
            yield made, publisher


@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 2**22])
async def test_every_engine_has_what_was_broadcast(bucket_bytes: int) -> None:
    """P7 P24: two engines, one bucket or many, bit for bit; the group and the buffer last for the second update."""
    async with (
        served(is_open=True) as one,
        served(is_open=True) as other,
        trained(one, other, bucket_bytes=bucket_bytes) as (_, publisher),
    ):
        wanted = small_model(seed=1).state_dict()
        record = await publisher.publish(wanted, 1, pause={"deadline_s": 5.0})
        assert record["workers"] == {name: {"ok": True, "version": 1} for name in ("w0", "w1")}
        assert same(weights(one), wanted)
        assert same(weights(other), wanted)
        kept, allocated = groups(one), publisher.allocated
        wanted = small_model(seed=2).state_dict()
        assert (await publisher.publish(iter(wanted.items()), 2, pause={}))["version"] == 2
        assert same(weights(one), wanted)
        assert same(weights(other), wanted)
        assert groups(one) == groups(other) == kept, "no group is made anew for the same engines"
        assert publisher.allocated == allocated, "the second update allocates no buffer"


async def test_an_engine_that_came_since_is_in_the_next_group() -> None:
    """P24: the group of the engines that were there is left by them; the next one has all three."""
    async with served(is_open=True) as one, served(is_open=True) as late, trained(one) as (made, publisher):
        await publisher.publish(small_model(seed=1).state_dict(), 1, pause={})
        before = groups(one)
        await late.call("/update_weight_version", {"new_version": "1"})
        await made.service.add_worker(WorkerConfig(url=url_of(late)))
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        wanted = small_model(seed=2).state_dict()
        record = await publisher.publish(wanted, 2, pause={})
        assert [outcome["ok"] for outcome in record["workers"].values()] == [True, True]
        assert same(weights(one), wanted)
        assert same(weights(late), wanted)
        assert len(groups(one)) == 1
        assert groups(one) == groups(late) != before


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_engine_refuses_is_received_by_all_and_changes_none(streamed: bool) -> None:
    """P24 P35: unknown names and NaN: named, quickly, with both engines as they were; and the next update works."""
    good = small_model(seed=1).state_dict()
    unknown = {**good, "extra.weight": torch.zeros(2)}
    infinite = {**good, "norm.bias": torch.full((64,), float("nan"))}
    async with (
        served(is_open=True) as one,
        served(is_open=True) as other,
        trained(one, other) as (_, publisher),
    ):
        had = weights(one)
        for bad, told in ((unknown, "unknown extra.weight"), (infinite, "norm.bias has values that are not finite")):
            with pytest.raises(NotNow) as raised:
                await publisher.publish(iter(bad.items()) if streamed else bad, 1, pause={}, check_finite=True)
            assert told in str(raised.value.detail)
            assert same(weights(one), had)
            assert same(weights(other), had)
        assert (await publisher.publish(good, 1))["version"] == 1
        assert same(weights(one), good)
        assert same(weights(other), good)
        kept = groups(one)
        with pytest.raises(NotNow):
            await publisher.publish(unknown, 2)
        assert (await publisher.publish(good, 2))["version"] == 2
        assert groups(one) == groups(other) == kept, "nothing was sent in between: it is as good as it was"


async def test_the_group_of_an_update_that_nobody_took_is_not_used_again() -> None:
    """P24: all that was streamed arrived, and is not the whole model: refused at the end, and the next update works."""
    good = small_model(seed=1).state_dict()
    lacking = {name: tensor for name, tensor in good.items() if name != "norm.bias"}
    async with served(is_open=True) as one, served(is_open=True) as other, trained(one, other) as (_, publisher):
        with pytest.raises(NotNow) as raised:
            await publisher.publish(iter(lacking.items()), 1, pause={})
        assert "missing norm.bias" in str(raised.value.detail)
        assert (await publisher.publish(good, 1))["version"] == 1
        assert same(weights(one), good)
        assert same(weights(other), good)


async def test_an_engine_that_lost_its_group_is_in_the_next_one() -> None:
    """P24: another process at the same address, unnoticed: one update fails, with all as they were, the next works."""
    async with (
        served(is_open=True) as one,
        served(is_open=True) as other,
        trained(one, other) as (_, publisher),
    ):
        await publisher.publish(small_model(seed=1).state_dict(), 1, pause={})
        had = weights(one)
        one.engine._groups.leave(groups(one)[0])
        wanted = small_model(seed=2).state_dict()
        began = time.monotonic()
        with pytest.raises(NotNow) as raised:
            await publisher.publish(wanted, 2, pause={})
        assert time.monotonic() - began < TIMEOUT_S, "nobody waited out a timeout"
        assert "was not joined here" in str(raised.value.detail)
        assert same(weights(one), had)
        assert same(weights(other), had)
        assert (await publisher.publish(wanted, 2))["version"] == 2
        assert same(weights(one), wanted)
        assert same(weights(other), wanted)


async def test_an_engine_that_dies_half_way_ends_the_update_and_no_other() -> None:
    """P24: killed between two buckets: an error within the bound, the others are as they were, the next update works.

    And one that is told to end while it is in a group does so at once, and well.
    """
    async with AsyncExitStack() as stack, served(is_open=True) as here:
        starting = (stack.enter_async_context(engine_process("--context", "256")) for _ in range(2))
        (victim, victim_url), (process, url) = await asyncio.gather(*starting)
        made = await stack.enter_async_context(stage(victim_url, url, url_of(here)))
        sender = DistributedSender(BUCKET_BYTES, timeout_s=TIMEOUT_S)
        async with WeightPublisher(made.service, way=sender, bucket_bytes=BUCKET_BYTES) as publisher:
            good = small_model(seed=1).state_dict()
            await publisher.publish(good, 1, pause={})
            had, before = weights(here), groups(here)

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for place, pair in enumerate(small_model(seed=2).state_dict().items()):
                    if place == 8:
                        victim.kill()
                    yield pair

            began = time.monotonic()
            with pytest.raises(NotNow) as raised:
                await publisher.publish(tensors(), 2, pause={})
            assert time.monotonic() - began < 2 * TIMEOUT_S
            assert raised.value.detail["workers"]["w0"]["ok"] is False
            assert same(weights(here), had)
            assert before[0] not in groups(here)
            await made.service.remove_worker("w0")
            await publisher.publish(small_model(seed=2).state_dict(), 2)
            assert same(weights(here), small_model(seed=2).state_dict())
            assert groups(here)
            began = time.monotonic()
            process.terminate()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert time.monotonic() - began < TIMEOUT_S


async def test_what_was_broadcast_is_taken_back_where_one_refuses_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """P24: the built-in engine keeps what it swapped out, by whichever way it got the new weights."""
    async with (
        served(is_open=True) as one,
        served(is_open=True) as other,
        trained(one, other, on_failure="rollback") as (made, publisher),
    ):
        wanted = small_model(seed=1).state_dict()
        await publisher.publish(wanted, 1, pause={})
        refuse_to_end(other, monkeypatch)
        with pytest.raises(NotNow) as raised:
            await publisher.publish(small_model(seed=2).state_dict(), 2, pause={})
        assert "it was taken back" in raised.value.detail["workers"]["w0"]["error"]
        assert same(weights(one), wanted)
        assert same(weights(other), wanted)
        assert [str(worker["state"]) for worker in made.service.workers()] == ["ACTIVE", "ACTIVE"]
