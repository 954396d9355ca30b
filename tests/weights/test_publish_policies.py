"""Updates through shared memory that fail at one of two engines, or end half-way; end to end, at the built-in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout_svc.config import WorkerConfig
from rollout_svc.embedded.model import WeightsError
from rollout_svc.errors import Conflict, NotNow
from rollout_svc.events import WeightUpdateEnded
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.workers.worker import WorkerState
from tests.embedded.helpers import Served, served, small_model
from tests.support.bell import WAIT_S
from tests.support.stage import Stage, stage
from tests.support.virtual import soon
from tests.weights.test_publish import GREEDY, answer, same, weights

FIRST, SECOND, THIRD = (small_model(seed=seed).state_dict() for seed in (1, 2, 3))


def url(engine: Served) -> str:
    """Where it is."""
    return str(engine.session._base_url)


def refuse_to_end(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have its next update refused when all of it is there."""
    updating = engine.engine._updating
    finish = updating.finish

    def refused(_: str | None) -> bool:
        monkeypatch.setattr(updating, "finish", finish)
        raise WeightsError("it has no room")

    monkeypatch.setattr(updating, "finish", refused)


class Halting:
    """Tensors of which the second one is waited for."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, pair in enumerate(SECOND.items()):
            if place == 1:
                self.reached.set()
                assert self.go_on.wait(WAIT_S)
            yield pair


def states(made: Stage) -> list[str]:
    """Of every worker."""
    return [str(worker["state"]) for worker in made.service.workers()]


async def over(made: Stage) -> None:
    """Wait until no update is under way."""
    task = made.service.weights.updating
    if task is not None:
        await asyncio.wait({task}, timeout=WAIT_S)
        await soon()
    assert made.service.weights.updating is None


@pytest.mark.parametrize("policy", ["stop", "rollback", "quarantine"])
async def test_one_that_fails_at_the_end(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7 P24: what both engines have, what the stage says and what tokens say is one thing; the next update heals."""
    async with served(is_open=True) as one, served(is_open=True) as other:
        settings: dict[str, Any] = {"weights": {"on_failure": policy}, **GREEDY}
        async with (
            stage(url(one), url(other), **settings) as made,
            WeightPublisher(made.service, bucket_bytes=2**14) as publisher,
        ):
            await publisher.publish(FIRST, 1, pause={})
            refuse_to_end(other, monkeypatch)
            if policy == "quarantine":
                record = await publisher.publish(SECOND, 2, pause={})
            else:
                with pytest.raises(NotNow) as raised:
                    await publisher.publish(SECOND, 2, pause={})
                record = raised.value.detail
                assert "it has no room" in str(raised.value), "said where a trainer's traceback shows it"
            ended = made.of(WeightUpdateEnded)[-1]
            assert not ended.ok, "it did not reach all, also where the others go on"
            assert "did not reach w1" in ended.error
            assert "it has no room" in ended.error
            assert "it has no room" in record["workers"]["w1"]["error"]
            version = 1 if policy == "rollback" else 2
            assert (record["version"], made.service.status()["weight_version"]) == (version, version)
            assert same(weights(one), FIRST if policy == "rollback" else SECOND)
            assert same(weights(other), FIRST)
            assert states(made) == ["ACTIVE", "ACTIVE" if policy == "rollback" else "QUARANTINED"]
            assert made.service.state == ("running" if policy == "quarantine" else "paused")
            if policy != "quarantine":
                await made.resume(weight_version=version)
            await made.push(1)
            spans = (await answer(made, 2))["weight_versions"]
            assert [span["version"] for span in spans] == [version]
            healed = await publisher.publish(THIRD, 3, pause={})
            assert all(told["ok"] for told in healed["workers"].values())
            assert same(weights(one), THIRD)
            assert same(weights(other), THIRD)


async def test_swapped_back_twice_is_refused() -> None:
    """P24: what was swapped out is there once, until the next update begins; nothing changes where it is not."""
    async with served(is_open=True) as engine, stage(url(engine)) as made:
        assert (await engine.call("/revert_weight_update", {}))[0] == 400
        async with WeightPublisher(made.service) as publisher:
            await publisher.publish(FIRST, 1, pause={})
            await publisher.publish(SECOND, 2, pause={})
            assert (await engine.call("/revert_weight_update", {"weight_version": "1"}))[0] == 200
            assert same(weights(engine), FIRST)
            assert (await engine.call("/model_info", method="GET"))[1]["weight_version"] == "1"
            status, said = await engine.call("/revert_weight_update", {"weight_version": "0"})
            assert (status, said["kind"]) == (400, "bucket")
            assert same(weights(engine), FIRST)


async def test_a_caller_that_leaves_ends_its_wait_and_not_the_update() -> None:
    """P14 P24: the call is cancelled, the update goes on to its end and resumes; meanwhile another is refused."""
    halting = Halting()
    async with served(is_open=True) as engine, stage(url(engine)) as made:
        async with WeightPublisher(made.service, bucket_bytes=512) as publisher:
            update = made.service.update_weights
            calls: list[asyncio.Task[Any]] = []

            async def left(*args: Any, **kwargs: Any) -> Any:
                calls.append(made.start(update(*args, **kwargs)))
                await asyncio.to_thread(halting.reached.wait, WAIT_S)
                calls[0].cancel()
                with pytest.raises(Conflict):
                    await update(3, {"kind": "external"}, {})
                halting.go_on.set()
                await over(made)
                return {}

            made.service.update_weights = left  # type: ignore[method-assign]
            await publisher.publish(halting, 1, pause={})
            assert calls[0].cancelled()
        assert (made.service.state, made.service.status()["weight_version"]) == ("running", 1)
        assert same(weights(engine), SECOND)


async def test_a_publisher_that_leaves_half_way_changes_nothing() -> None:
    """P24: the trainer's call is cancelled, and whoever has the weights is gone: paused, as it was, nothing staged."""
    halting = Halting()
    async with served(is_open=True) as engine, stage(url(engine)) as made:
        had = weights(engine)
        async with WeightPublisher(made.service, bucket_bytes=512) as publisher:
            publishing = made.start(publisher.publish(halting, 1, pause={}))
            await asyncio.to_thread(halting.reached.wait, WAIT_S)
            publishing.cancel()
            halting.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            await over(made)
            assert (made.service.state, made.service.status()["weight_version"]) == ("paused", 0)
            assert states(made) == ["ACTIVE"]
            assert same(weights(engine), had)
            assert not engine.engine._updating.open
            assert (await publisher.publish(FIRST, 1))["version"] == 1


async def test_a_service_that_stops_in_the_middle_leaves_engines_as_they_were() -> None:
    """P24: whoever asked is told, what was staged is forgotten, the weights are those before."""
    halting = Halting()
    async with served(is_open=True) as engine:
        had = weights(engine)
        async with stage(url(engine)) as made:
            publisher = WeightPublisher(made.service, bucket_bytes=512)
            publishing = made.start(publisher.publish(halting, 1, pause={}))
            await asyncio.to_thread(halting.reached.wait, WAIT_S)
            stopping = made.start(made.service.stop())
            await soon()
            assert made.service.state == "stopping"
            halting.go_on.set()
            await stopping
            with pytest.raises(NotNow) as raised:
                await publishing
            assert raised.value.type == "stopping"
            await publisher.close()
        assert same(weights(engine), had)
        assert not engine.engine._updating.open


async def test_one_that_joins_later_waits_for_the_next_update_and_is_listed() -> None:
    """P24: what came through memory cannot be had again: no traffic before, and `take_batch` says why."""
    async with (
        served(is_open=True) as one,
        served(is_open=True) as late,
        stage(url(one), **GREEDY) as made,
        WeightPublisher(made.service) as publisher,
    ):
        await publisher.publish(FIRST, 1, pause={})
        await made.service.add_worker(WorkerConfig(url=url(late)))
        await made.until(lambda: "cannot be replayed" in made.worker(1).reason)
        assert states(made) == ["ACTIVE", "QUARANTINED"]
        with pytest.raises(NotNow) as raised:
            await made.take(timeout_s=0.01)
        assert "cannot be replayed" in raised.value.detail["workers"]["w1"]
        record = await publisher.publish(SECOND, 2, pause={})
        assert record["workers"]["w1"] == {"ok": True, "version": 2}
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert same(weights(late), SECOND)
