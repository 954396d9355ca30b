"""Weights by `cuda_ipc` through the service, into faked engines that rebuild them by their own rules, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from rollout_svc.errors import NotNow
from rollout_svc.rpc.client import RolloutClient
from rollout_svc.weights.payloads.lmdeploy import Event
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.cuda_ipc import CudaIpcSender
from rollout_svc.weights.senders.protocol import Engine
from rollout_svc.workers.worker import WorkerState
from tests.rpc.api import api
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang, Status
from tests.support.fake_vllm import FakeVLLM
from tests.support.lmdeploy_weights import Rank
from tests.support.stage import Stage, stage
from tests.weights.test_lmdeploy_round import Shared
from tests.weights.test_payloads import Named, same

BEGIN, TENSOR, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
LABEL, UPDATE = "/update_weight_version", "/update_weights"
INIT, START, FINISH = "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"
BUCKET = 64
"""Bytes: two or three of the tensors below."""


def tensors(factor: float) -> list[Named]:
    """Tensors of two dtypes that alternate; some are strided, one is a scalar, and the last is the largest."""
    return [
        ("half", torch.arange(3).bfloat16() * factor),
        ("whole", torch.arange(6.0).reshape(2, 3).t() * factor),
        ("more", torch.arange(8.0)[::2] * factor),
        ("scale", torch.tensor(2.0) * factor),
        ("late", torch.arange(5).bfloat16() * factor),
        ("large", torch.arange(40.0) * factor),
    ]


def sglang() -> FakeSGLang:
    """An SGLang of two ranks."""
    engine = FakeSGLang()
    engine.ranks, engine.told = [{}, {}], {"tp_size": 2}
    return engine


def lmdeploy(*ranks: Rank) -> FakeLMDeploy:
    """An LMDeploy of these ranks, or of one."""
    engine = FakeLMDeploy()
    engine.ranks = list(ranks) or [Rank()]
    return engine


def vllm() -> FakeVLLM:
    """A vLLM that takes weights by handles."""
    engine = FakeVLLM()
    engine.transfer = "ipc"
    return engine


def loaded(engine: Any) -> list[dict[str, torch.Tensor]]:
    """What each rank of it has."""
    if isinstance(engine, FakeSGLang):
        return engine.ranks
    if isinstance(engine, FakeLMDeploy):
        return [rank.weights for rank in engine.ranks]
    return [engine.by_handles.worker.weights]


def paths(engine: Any) -> list[str]:
    """The calls of updates that it was made, in order."""
    known = {BEGIN, TENSOR, END, LABEL, UPDATE, INIT, START, FINISH}
    return [path for method, path in engine.hits if method == "POST" and path in known]


class Fleet:
    """Engines, a stage over them, and a publisher."""

    def __init__(self, made: Stage, engines: list[Any], publisher: WeightPublisher) -> None:
        self.made = made
        self.engines = engines
        self.publisher = publisher

    async def publish(self, given: Any, version: int) -> Mapping[str, Any]:
        """Update, with a pause around it."""
        return await self.publisher.publish(given, version, pause={"deadline_s": 5.0})

    def has(self, wanted: list[Named], *places: int) -> bool:
        """Whether these engines have them bit for bit, whatever the order."""
        chosen = [self.engines[place] for place in places] if places else self.engines
        return all(
            same({name: found[name] for name, _ in wanted} if len(found) == len(wanted) else found, wanted)
            for engine in chosen
            for found in loaded(engine)
        )


async def fleet_of(stack: AsyncExitStack, *engines: Any, sender: CudaIpcSender | None = None) -> Fleet:
    """Start them."""
    for engine in engines:
        await stack.enter_async_context(engine)
    made = await stack.enter_async_context(stage(*engines))
    publisher = await stack.enter_async_context(WeightPublisher(made.service, way="cuda_ipc", bucket_bytes=BUCKET))
    if sender is not None:
        publisher._sender = sender
    return Fleet(made, list(engines), publisher)


def with_event(event: Shared) -> CudaIpcSender:
    """A sender for an LMDeploy that opens this event."""
    made: Event = event
    return CudaIpcSender(BUCKET, lambda _: made)


@pytest.mark.parametrize("make", [sglang, lmdeploy, lambda: lmdeploy(Rank(), Rank()), vllm])
async def test_each_engine_has_what_was_published(make: Callable[[], Any]) -> None:
    """P7 P24 P26: two updates, every rank, bit for bit, strided, scalar and mixed dtypes; the version confirmed."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, make())
        for version in (1, 2):
            record = await fleet.publish(iter(tensors(version)) if version == 1 else dict(tensors(version)), version)
            told = {} if fleet.made.worker().labels else {"confirmed": False}
            assert record == {"version": version, "workers": {"w0": {"ok": True, "version": version, **told}}}
            assert fleet.has(tensors(version))
        assert fleet.made.worker().version == 2


async def test_one_update_of_a_mixed_fleet() -> None:
    """P24: three kinds of engine, one flatten for each layout, and every one of them has all of it."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, lmdeploy(Rank(), Rank()), sglang(), vllm(), lmdeploy())
        record = await fleet.publish(tensors(3), 1)
        assert {outcome["version"] for outcome in record["workers"].values()} == {1}
        assert fleet.has(tensors(3))


async def test_a_trainer_over_http_publishes_so_too() -> None:
    """P24: by the service's own API, from a client; without a publisher's address the request is refused."""
    engine = sglang()
    async with engine, api(engine) as call, RolloutClient(call.url) as client:
        async with WeightPublisher(client, way="cuda_ipc", bucket_bytes=BUCKET) as publisher:
            record = await publisher.publish(tensors(2), 1, pause={"deadline_s": 5.0})
        assert record["workers"]["w0"] == {"ok": True, "version": 1}
        assert all(same(found, tensors(2)) for found in engine.ranks)
        body = {"version": 2, "source": {"kind": "cuda_ipc"}, "pause": {}}
        status, _, detail = await call.refused("POST", "/v1/weights", body)
        assert (status, [problem["path"] for problem in detail]) == (400, ["source.publisher"])


async def test_the_calls_of_sglang() -> None:
    """P24: opened, labelled as loading, buckets, closed, labelled; nothing flushed by a bucket, nothing aborted."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, sglang())
        [engine] = fleet.engines
        engine.update_open = True  # a sender that died has left it so
        engine.hits.clear()
        engine.updates.clear()
        await fleet.publish(tensors(1), 7)
        count = paths(engine).count(TENSOR)
        assert count > 2
        assert paths(engine) == [BEGIN, END, BEGIN, LABEL, *[TENSOR] * count, END, LABEL]
        labels = [body["new_version"] for path, body in engine.updates if path == LABEL]
        assert labels == ["loading 7", "7"]
        assert not any(body.get("flush_cache") or body["abort_all_requests"] for _, body in engine.updates)
        assert engine.count("/flush_cache") == 1
        engine.update_sessions, engine.update_open = False, False  # an older one, without such routes
        await fleet.publish(tensors(2), 8)
        assert fleet.has(tensors(2))
        assert paths(engine)[-count - 3 :] == [BEGIN, LABEL, *[TENSOR] * count, LABEL]


async def test_the_calls_of_lmdeploy_and_vllm() -> None:
    """P24: LMDeploy is told `finished` by itself; vLLM is labelled before it starts, and by its finish."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, lmdeploy(), vllm())
        one, other = fleet.engines
        other.hits.clear()
        other.updates.clear()
        await fleet.publish(tensors(1), 7)
        finished = [body["finished"] for _, body in one.updates]
        assert finished == [False] * (len(finished) - 1) + [True]
        count = paths(other).count(UPDATE)
        assert paths(other) == [INIT, LABEL, START, *[UPDATE] * count, FINISH]
        assert [body for path, body in other.updates if path == LABEL] == [{"new_version": "loading 7"}]
        assert (other.weight_version, other.poisoned) == ("7", False)


def trouble(engine: Any) -> None:
    """Have its next bucket refused."""
    if isinstance(engine, FakeVLLM):
        engine.by_handles.fail_at = 1
    else:
        engine.script(TENSOR if isinstance(engine, FakeSGLang) else UPDATE, Status(500))


def breaking(engine: Any, given: list[Named]) -> Iterator[Named]:
    """Tensors of which the fifth is asked for when an engine has the first bucket, and not yet the second."""
    for place, pair in enumerate(given):
        if place == 4:
            trouble(engine)
        yield pair


@pytest.mark.parametrize("make", [sglang, lmdeploy, vllm])
async def test_a_bucket_refused_half_way(make: Callable[[], Any]) -> None:
    """P24: both engines are named and out of traffic, for they hold parts of both; the next update brings them back."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, make(), sglang())
        await fleet.publish(tensors(1), 1)
        with pytest.raises(NotNow) as raised:
            await fleet.publish(breaking(fleet.engines[0], tensors(2)), 2)
        record = raised.value.detail
        assert record["version"] == 1
        assert not any(outcome["ok"] for outcome in record["workers"].values())
        assert "500" in record["workers"]["w0"]["error"]
        assert not fleet.has(tensors(1), 0)
        for place, engine in enumerate(fleet.engines):
            assert fleet.made.worker(place).state is WorkerState.QUARANTINED
            assert "half-way" in fleet.made.worker(place).reason
            assert isinstance(engine, FakeLMDeploy) or engine.weight_version == "loading 2"
            assert not getattr(engine, "update_open", False), "closed, or it would refuse the next"
        if make is vllm:
            fleet.engines[0].by_handles.fail_at = None
        good = await fleet.publish(tensors(3), 3)
        assert {outcome["version"] for outcome in good["workers"].values()} == {3}
        assert fleet.has(tensors(3))
        assert not getattr(fleet.engines[0], "poisoned", False)
        await fleet.made.until(lambda: all(fleet.made.worker(place).state is WorkerState.ACTIVE for place in range(2)))


async def test_a_failure_elsewhere_ends_the_update_where_it_was_well() -> None:
    """P24: a vLLM has weights again, an LMDeploy forgets the buffer; both are named, for they hold parts of both."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, sglang(), vllm(), lmdeploy())
        with pytest.raises(NotNow) as raised:
            await fleet.publish(breaking(fleet.engines[0], tensors(2)), 2)
        assert "another worker failed" in raised.value.detail["workers"]["w1"]["error"]
        _, one, other = fleet.engines
        assert (paths(one)[-1], one.weight_version) == (FINISH, "loading 2")
        assert other.updates[-1][1]["finished"] is True
        assert [fleet.made.worker(place).version for place in range(3)] == [None] * 3


async def test_a_round_another_left_open_is_ended_before_the_next() -> None:
    """P24: a vLLM whose sender died says `loading`: its round is ended, and what it keeps of it is never loaded."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, vllm(), sglang())
        await fleet.publish(tensors(1), 1)
        [engine] = fleet.engines[:1]
        engine.script(FINISH, Status(500))
        with pytest.raises(NotNow):
            await fleet.publish(tensors(2), 2)
        assert engine.weight_version == "loading 2"
        assert fleet.made.worker(1).version == 2
        engine.hits.clear()
        await fleet.publish(tensors(3), 3)
        assert paths(engine)[: paths(engine).index(LABEL)] == [INIT, FINISH, START, FINISH]
        assert fleet.has(tensors(3))


@pytest.mark.parametrize("make", [sglang, lmdeploy, vllm])
async def test_an_update_of_nothing_changes_nothing(make: Callable[[], Any]) -> None:
    """P24: no bucket, no version: the engine keeps its label and its traffic, and nothing is left open."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, make())
        [engine] = fleet.engines
        with pytest.raises(NotNow) as raised:
            await fleet.publish(iter(()), 1)
        assert "there was no tensor to send" in str(raised.value.detail)
        assert fleet.made.worker().version == 0
        assert fleet.made.worker().state is WorkerState.ACTIVE
        assert not getattr(engine, "update_open", False)
        assert not {TENSOR, UPDATE, START} & set(paths(engine))


async def test_an_engine_that_cannot_be_served_so_ends_the_update_before_it_began() -> None:
    """P24 P35: a vLLM without the backend, or of several devices, is named, and nobody has changed."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, FakeVLLM(), sglang())
        with pytest.raises(NotNow) as raised:
            await fleet.publish(tensors(1), 1)
        assert "vllm takes no weights by cuda_ipc here" in str(raised.value.detail)
        assert not {BEGIN, TENSOR} & set(paths(fleet.engines[1]))
    with pytest.raises(ValueError, match="w0: expected one vLLM worker, not 2"):
        CudaIpcSender(BUCKET).open([Engine("w0", "vllm", 2)])
    with pytest.raises(ValueError, match="w0: other takes no weights by cuda_ipc"):
        CudaIpcSender(BUCKET).open([Engine("w0", "other", 1)])


# -- LMDeploy's buffer and event: each row of what its consumer does in silence ----------------------------------


def carried(engine: FakeLMDeploy) -> list[set[str]]:
    """The parts of each call since this was asked last, but for the last of an update."""
    [rank] = engine.ranks
    found, rank.carried = rank.carried, []
    return found


WHOLE = {"metadata", "require_clone", "flattened_tensor"}
FIRST = WHOLE | {"event_ipc_handle"}
LATER = {"metadata", "require_clone"}


def one_kind(factor: float, *sizes: int) -> list[Named]:
    """Tensors of one dtype, each a bucket."""
    return [(f"t{place}", torch.arange(float(size)) * factor) for place, size in enumerate(sizes)]


async def test_with_an_event_the_buffer_travels_once_a_round() -> None:
    """P26: kept, not cloned, and right; the first call of the next update carries it again; nothing is allocated."""
    event = Shared()
    async with AsyncExitStack() as stack:
        sender = with_event(event)
        fleet = await fleet_of(stack, lmdeploy(Rank(event.open)), sender=sender)
        for version in (1, 2):
            await fleet.publish(one_kind(version, 16, 16, 12), version)
            assert carried(fleet.engines[0]) == [FIRST, LATER, LATER]
            assert fleet.has(one_kind(version, 16, 16, 12))
            assert sender.allocated == 64
        assert sender.cloned is None
        turn = ["sender waits", "sender records", "engine waits", "engine records"]
        assert event.log == turn * 6


async def test_another_dtype_and_a_larger_bucket_carry_the_buffer_again() -> None:
    """P26: else old bytes would be read as another dtype, or metadata point past the buffer."""
    event = Shared()
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, lmdeploy(Rank(event.open)), sender=with_event(event))
        await fleet.publish(tensors(2), 1)
        assert carried(fleet.engines[0]) == [FIRST] * 4  # bfloat16, float32, bfloat16, and one too large for the second
        assert fleet.has(tensors(2))


async def test_without_an_event_every_call_carries_the_buffer() -> None:
    """P26: nothing rests on a clone, or on an event that the engine may not open; said once, and attribute says why."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, lmdeploy())
        for version in (1, 2):
            await fleet.publish(one_kind(version, 16, 16, 12), version)
            assert carried(fleet.engines[0]) == [WHOLE] * 3
            assert fleet.has(one_kind(version, 16, 16, 12))
        sender = fleet.publisher._sender
        assert isinstance(sender, CudaIpcSender)
        assert sender.cloned == "no event of cpu can be opened by another process"


async def test_several_ranks_share_no_event() -> None:
    """P26: it would know the last reading alone: all are sent the buffer."""
    event = Shared()
    async with AsyncExitStack() as stack:
        sender = with_event(event)
        fleet = await fleet_of(stack, lmdeploy(Rank(event.open)), lmdeploy(Rank(event.open)), sender=sender)
        await fleet.publish(one_kind(1, 16, 16), 1)
        assert [carried(engine) for engine in fleet.engines] == [[WHOLE] * 2] * 2
        assert fleet.has(one_kind(1, 16, 16))
        assert "2 ranks" in (sender.cloned or "")
        assert event.log == []


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_bucket_refused_under_an_event_comes_again_without_and_the_update_goes_on(failing: int) -> None:
    """P26: the round begins anew with it, in the same update, and no other engine is given that bucket twice."""
    event = Shared()
    async with AsyncExitStack() as stack:
        sender = with_event(event)
        fleet = await fleet_of(stack, lmdeploy(Rank(event.open)), vllm(), sender=sender)
        engine, other = fleet.engines
        given = one_kind(1, 16, 16, 16)

        def breaking_off() -> Iterator[Named]:
            for place, pair in enumerate(given):
                if place == failing + 1:
                    engine.script(UPDATE, Status(500))
                yield pair

        if failing == 0:
            engine.script(UPDATE, Status(500))
        record = await fleet.publish(given if failing == 0 else breaking_off(), 1)
        assert all(told["ok"] for told in record["workers"].values())
        assert fleet.has(given)
        assert carried(engine) == ([WHOLE] * 3 if failing == 0 else [FIRST, WHOLE, WHOLE])
        assert paths(other).count(UPDATE) == 3
        assert all("with_event" not in body for _, body in engine.updates)
        assert (sender.cloned or "").startswith("w0: under an event: HTTP 500")
        await fleet.publish(one_kind(2, 16, 16, 16), 2)
        assert carried(engine) == [WHOLE] * 3
        assert fleet.has(one_kind(2, 16, 16, 16))


@pytest.mark.parametrize(
    ("statuses", "why"),
    [((503,), "an update failed under an event"), ((500, 500), "w0: under an event: HTTP 500")],
)
async def test_after_a_failure_the_round_begins_anew_and_without_the_event(statuses: Sequence[int], why: str) -> None:
    """P26: nobody knows what the engine has kept, nor whether it was the event: the buffer travels with every call."""
    event = Shared()
    async with AsyncExitStack() as stack:
        sender = with_event(event)
        fleet = await fleet_of(stack, lmdeploy(Rank(event.open)), sender=sender)
        [engine] = fleet.engines
        given = one_kind(1, 16, 16, 16)

        def breaking_off() -> Iterator[Named]:
            for place, pair in enumerate(given):
                if place == 2:
                    engine.script(UPDATE, *map(Status, statuses))
                yield pair

        with pytest.raises(NotNow):
            await fleet.publish(breaking_off(), 1)
        assert engine.updates[-1][1]["finished"] is True, "it has let go of buffer and event"
        assert carried(engine) == [FIRST]
        await fleet.publish(one_kind(2, 16, 16), 2)
        assert carried(engine) == [WHOLE] * 2
        assert loaded(engine)[0]["t1"].tolist() == one_kind(2, 16, 16)[1][1].tolist()
        assert (sender.cloned or "").startswith(why)
