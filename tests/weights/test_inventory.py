"""Weights that lack what the last whole update had: engines that load as it comes are never told that it is the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from rollout_svc.errors import NotNow
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.distributed import DistributedSender
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_vllm import FakeVLLM
from tests.support.stage import stage
from tests.weights.test_cuda_ipc import BUCKET, FINISH, Fleet, fleet_of, lmdeploy, paths, sglang, tensors, vllm


async def fleet_by(way: str, stack: AsyncExitStack, *engines: Any) -> Fleet:
    """A fleet, and a publisher of this way."""
    if way == "cuda_ipc":
        return await fleet_of(stack, *engines)
    for engine in engines:
        await stack.enter_async_context(engine)
    made = await stack.enter_async_context(stage(*engines))
    sender = DistributedSender(BUCKET, timeout_s=3.0)
    publisher = await stack.enter_async_context(WeightPublisher(made.service, way=sender, bucket_bytes=BUCKET))
    return Fleet(made, list(engines), publisher)


def by_group() -> FakeVLLM:
    """A vLLM that takes weights in a group."""
    engine = FakeVLLM()
    engine.transfer = "nccl"
    return engine


def without(*names: str, factor: float = 2.0) -> dict[str, torch.Tensor]:
    """All tensors but these."""
    return {name: tensor for name, tensor in tensors(factor) if name not in names}


def reshaped() -> dict[str, torch.Tensor]:
    """All of them, one in another shape."""
    return {**without(), "large": torch.zeros(4, 10)}


WAYS: list[tuple[str, Callable[[], Any]]] = [
    ("cuda_ipc", vllm),
    ("cuda_ipc", sglang),
    ("cuda_ipc", lmdeploy),
    ("distributed", by_group),
]


@pytest.mark.parametrize(("way", "make"), WAYS)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (without("late"), "missing late: "),
        (reshaped(), r"large: \[4, 10\] in place of \[40\]: "),
    ],
)
async def test_a_mapping_is_refused_before_anything_is_stopped(
    way: str, make: Callable[[], Any], given: Mapping[str, torch.Tensor], told: str
) -> None:
    """P24 P35: by name, the engine untouched and the stage running; said to be meant, it goes through, from then on."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_by(way, stack, make())
        [engine] = fleet.engines
        await fleet.publish(dict(tensors(1)), 1)
        asked = paths(engine)
        with pytest.raises(ValueError, match=told + "the last whole update was another"):
            await fleet.publish(given, 2)
        assert paths(engine) == asked
        assert (fleet.made.service.state, fleet.made.service.status()["weight_version"]) == ("running", 1)
        await fleet.publisher.publish(given, 2, pause={}, check_names=False)
        assert (await fleet.publish(given, 3))["version"] == 3


@pytest.mark.parametrize(("way", "make"), WAYS)
async def test_a_stream_that_lacks_some_has_no_end(way: str, make: Callable[[], Any]) -> None:
    """P24 P35: no engine is labelled with it; it is named, out of traffic, and healed by the next whole one."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_by(way, stack, make())
        [engine] = fleet.engines
        await fleet.publish(iter(tensors(1)), 1)
        with pytest.raises(NotNow) as raised:
            await fleet.publish(iter(without("late", "half").items()), 2)
        [error] = [told["error"] for told in raised.value.detail["workers"].values()]
        assert "missing half, late: the last whole update was another; pass `check_names=False`" in error
        worker = fleet.made.worker()
        assert (worker.state, worker.version, worker.half_loaded) == (WorkerState.QUARANTINED, None, True)
        assert fleet.made.service.status()["weight_version"] == 1
        if isinstance(engine, FakeVLLM):
            assert engine.weight_version == "loading 2"
        assert (await fleet.publish(iter(tensors(3)), 3))["workers"]["w0"]["ok"]
        await fleet.made.until(lambda: worker.state is WorkerState.ACTIVE)
        assert (worker.version, worker.half_loaded) == (3, False)


async def test_a_tensor_of_another_shape_is_not_sent() -> None:
    """P24: of a stream, the bucket that has it is refused before any engine is told of it."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, vllm())
        [engine] = fleet.engines
        await fleet.publish(iter(tensors(1)), 1)
        had = engine.by_handles.worker.weights["large"]
        with pytest.raises(NotNow) as raised:
            await fleet.publish(iter(reshaped().items()), 2)
        assert "large: [4, 10] in place of [40]" in str(raised.value.detail)
        assert engine.by_handles.worker.weights["large"] is had


async def test_an_update_that_failed_is_no_measure() -> None:
    """P24: what the next has to have is what the last whole one had, and more is none of its business."""
    async with AsyncExitStack() as stack:
        fleet = await fleet_of(stack, vllm())
        [engine] = fleet.engines
        engine.by_handles.fail_at = 1
        with pytest.raises(NotNow):
            await fleet.publish({**without(), "more still": torch.zeros(3)}, 1)
        engine.by_handles.fail_at = None
        await fleet.publish(without("late"), 2)
        await fleet.publish(without(), 3)
        assert paths(engine)[-1] == FINISH
        with pytest.raises(ValueError, match="missing late"):
            await fleet.publish(without("late"), 4)
