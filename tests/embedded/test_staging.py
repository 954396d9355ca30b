"""Updates in buckets at the built-in engine: one at a time, whoever sends them and whoever leaves in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from rollout_svc.embedded.engine import Engine
from rollout_svc.embedded.model import WeightsError
from rollout_svc.embedded.receiving import BucketError, Receiver
from rollout_svc.embedded.scheduler import Scheduler
from rollout_svc.embedded.updating import Updating
from tests.embedded.helpers import PATIENCE_S, VOCABULARY, small_model

Load = Callable[[list[tuple[str, torch.Tensor]]], object]


class Given(Receiver):
    """Takes tensors out of the call itself, once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()
        self.done = threading.Event()
        self.let = threading.Event()
        self.let.set()

    def receive(self, call: Mapping[str, Any], load: Load) -> int:
        self.inside.set()
        assert self.let.wait(PATIENCE_S)
        load(call["tensors"])
        self.done.set()
        return len(call["tensors"])


@asynccontextmanager
async def engine_and(receiver: Receiver) -> AsyncIterator[Engine]:
    """An engine that receives so."""
    model = small_model()
    engine = Engine(Scheduler(model, VOCABULARY, max_running=1))
    engine._updating = Updating(model, receiver)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def everything(seed: int) -> list[tuple[str, torch.Tensor]]:
    """All weights of another model."""
    return [(name, tensor.detach()) for name, tensor in small_model(seed).named_parameters()]


async def test_a_bucket_whose_sender_left_is_not_taken_for_one_of_the_next_update() -> None:
    """P24 P26: the thread that stages it is waited for before anything else is done with the update."""
    receiver = Given()
    receiver.let.clear()
    async with asyncio.timeout(PATIENCE_S), engine_and(receiver) as engine:
        await engine.begin_update(None, finite=False)
        receiving = asyncio.create_task(engine.receive_bucket({"tensors": everything(1)}), name="receiving")
        await asyncio.to_thread(receiver.inside.wait)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        beginning = asyncio.create_task(engine.begin_update(None, finite=False), name="beginning")
        for _ in range(5):
            await asyncio.sleep(0)  # as far as it comes
        receiver.let.set()
        await beginning
        await asyncio.to_thread(receiver.done.wait)
        with pytest.raises(WeightsError, match="missing"):
            await engine.end_update("1")


async def test_a_tensor_that_comes_twice_is_refused() -> None:
    """P26 P35: in one bucket or in two: nobody can say which of them was meant."""
    twice = everything(1)[:1]
    async with engine_and(Given()) as engine:
        await engine.begin_update(None, finite=False)
        with pytest.raises(WeightsError, match=f"{twice[0][0]} came twice"):
            await engine.receive_bucket({"tensors": twice * 2})
        await engine.receive_bucket({"written": 2, "tensors": twice})
        with pytest.raises(WeightsError, match=f"{twice[0][0]} came twice"):
            await engine.receive_bucket({"written": 4, "tensors": twice})


async def test_a_call_that_is_repeated_does_nothing_more() -> None:
    """P24: its answer was lost, and it is made again: the bucket is no second one, the swap is not undone."""
    async with engine_and(Given()) as engine:
        await engine.begin_update(None, finite=False, update="a")
        call = {"written": 2, "tensors": everything(1), "update": "a"}
        assert [await engine.receive_bucket(call) for _ in range(2)] == [len(everything(1))] * 2
        for _ in range(2):
            await engine.end_update("1", "a")
        assert all(torch.equal(engine._scheduler.model.get_parameter(name), one) for name, one in everything(1))
        with pytest.raises(BucketError, match="no update was begun"):
            await engine.end_update("2", "b")


async def test_a_manifest_that_names_a_tensor_twice_is_refused() -> None:
    """P35: before anything is sent."""
    manifest = [{"name": name, "shape": list(one.shape), "dtype": "float32"} for name, one in everything(1)]
    async with engine_and(Given()) as engine:
        with pytest.raises(WeightsError, match=f"twice {manifest[0]['name']}"):
            await engine.begin_update([*manifest, manifest[0]], finite=False)


async def test_an_update_is_ended_by_who_began_it() -> None:
    """P24: of two services with one engine neither labels what the other has sent, nor forgets it."""
    async with engine_and(Given()) as engine:
        await engine.begin_update(None, finite=False, update="a")
        await engine.begin_update(None, finite=False, update="b")
        with pytest.raises(BucketError, match="another update was begun"):
            await engine.receive_bucket({"tensors": everything(1), "update": "a"})
        await engine.receive_bucket({"tensors": everything(2), "update": "b"})
        with pytest.raises(BucketError, match="another update was begun"):
            await engine.end_update("1", update="a")
        await engine.abandon_update("a")
        assert engine.version == "default"
        await engine.end_update("2", update="b")
        assert engine.version == "2"
