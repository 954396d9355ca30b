"""Weights from a trainer's process to the built-in engine through shared memory, by way of the service."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_svc.embedded import receiving
from rollout_svc.errors import NotNow
from rollout_svc.tensors.shared import own_prefix
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.workers.worker import WorkerState
from tests.embedded.helpers import Served, served, small_model
from tests.support.stage import Stage, stage

LIMIT = 12
GREEDY: dict[str, Any] = {"sampling": {"max_tokens": LIMIT, "temperature": 0.0, "extra": {"ignore_eos": True}}}


def segments() -> set[str]:
    """This process's segments of weight updates."""
    return {path.name for path in receiving.FOLDER.glob(f"{own_prefix(receiving.PREFIX)}*")}


def weights(engine: Served) -> dict[str, torch.Tensor]:
    """The engine's weights, copied."""
    return {name: parameter.detach().clone() for name, parameter in engine.scheduler.model.named_parameters()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


async def answer(made: Stage, step: int) -> dict[str, Any]:
    """Take the one sample."""
    sample: dict[str, Any] = (await made.take(step))["groups"][0]["samples"][0]
    return sample


@pytest.mark.parametrize("bucket_bytes", [512, 2**20])
async def test_every_engine_has_what_was_published(bucket_bytes: int) -> None:
    """P7 P24: two engines, one bucket or many: both have the weights bit for bit, and their tokens say so."""
    wanted = small_model(seed=1).state_dict()
    before = segments()
    async with served(is_open=True) as one, served(is_open=True) as other:
        urls = [str(engine.session._base_url) for engine in (one, other)]
        async with stage(*urls, pushed=1, **GREEDY) as made:
            await answer(made, 0)
            async with WeightPublisher(made.service, bucket_bytes=bucket_bytes) as publisher:
                record = await publisher.publish(wanted, 1, pause={"deadline_s": 5.0})
                allocated = publisher.allocated
                assert record["workers"] == {name: {"ok": True, "version": 1} for name in ("w0", "w1")}
                assert same(weights(one), wanted)
                assert same(weights(other), wanted)
                again = await publisher.publish(small_model(seed=2).state_dict(), 2, pause={})
                assert again["version"] == 2
                assert publisher.allocated == allocated, "the second update allocates no buffer"
            await made.push(1, first=1)
            later = await answer(made, 2)
            assert [span["version"] for span in later["weight_versions"]] == [2]
    assert segments() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra.weight": torch.zeros(2)}, "unknown extra.weight"),
        ({"norm.bias": torch.zeros(3)}, "norm.bias: float32 [3] in place of"),
        ({"norm.bias": torch.zeros(64).double()}, "norm.bias: float64 [64] in place of float32 [64]"),
        ({"norm.bias": None}, "missing norm.bias"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_does_not_fit_changes_no_engine(change: dict[str, Any], told: str, streamed: bool) -> None:
    """P24 P35: names, shapes and dtypes are refused with the list; both engines have what they had, and serve on."""
    tensors = {**small_model(seed=1).state_dict(), **change}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    async with served(is_open=True) as one, served(is_open=True) as other:
        urls = [str(engine.session._base_url) for engine in (one, other)]
        had = weights(one)
        async with stage(*urls, pushed=1, **GREEDY) as made:
            await answer(made, 0)
            async with WeightPublisher(made.service, bucket_bytes=512) as publisher:
                with pytest.raises(NotNow) as raised:
                    await publisher.publish(iter(given.items()) if streamed else given, 1, pause={})
                assert told in str(raised.value.detail)
                assert same(weights(one), had)
                assert same(weights(other), had)
                assert made.service.status()["weight_version"] == 0
                await made.resume()
                good = await publisher.publish(small_model(seed=1).state_dict(), 1, pause={})
                assert good["version"] == 1


async def test_not_a_number_is_refused_where_that_was_asked_for() -> None:
    """P35: checked on request, named, and nothing changed."""
    tensors = {**small_model(seed=1).state_dict(), "norm.bias": torch.full((64,), float("nan"))}
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        had = weights(engine)
        async with WeightPublisher(made.service) as publisher:
            with pytest.raises(NotNow) as raised:
                await publisher.publish(tensors, 1, pause={}, check_finite=True)
            assert "norm.bias has values that are not finite" in str(raised.value.detail)
            assert same(weights(engine), had)
            assert (await publisher.publish(tensors, 1))["version"] == 1


async def test_an_iterator_that_fails_ends_the_update_everywhere() -> None:
    """P24: the trainer's own error, half-way: nothing has changed, and what was staged is forgotten."""

    def tensors() -> Any:
        for place, pair in enumerate(small_model(seed=1).state_dict().items()):
            if place == 3:
                raise ValueError("the trainer lost a shard")
            yield pair

    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        had = weights(engine)
        async with WeightPublisher(made.service, bucket_bytes=256) as publisher:
            with pytest.raises(NotNow) as raised:
                await publisher.publish(tensors(), 1, pause={})
            assert "the trainer lost a shard" in str(raised.value.detail)
            assert same(weights(engine), had)


async def test_a_publisher_that_is_gone_ends_the_update() -> None:
    """P24: its address refuses: said at once, nothing has changed."""
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        with pytest.raises(NotNow) as raised:
            await made.service.update_weights(1, {"kind": "shm", "publisher": "http://127.0.0.1:9"}, {})
        assert "the publisher" in str(raised.value.detail)


async def test_a_label_that_an_update_has_set_is_no_sign_of_a_restart() -> None:
    """P24: a worker whose connection broke is asked what it has; in the middle of an update it may have either."""
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        worker = made.worker()
        worker.loading = True  # as from the look at who is still, to the word of the engine
        worker.doubt()
        await engine.call("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
        supervisor = made.parts.supervisor
        supervisor._assure(worker, await supervisor._control.info(worker))
        assert (worker.state, worker.unsure) == (WorkerState.ACTIVE, True)
        worker.version, worker.loading = 1, False
        supervisor._assure(worker, await supervisor._control.info(worker))
        assert (worker.state, worker.unsure) == (WorkerState.ACTIVE, False)
