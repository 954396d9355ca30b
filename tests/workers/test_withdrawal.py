"""A capability that an engine claims and has not: taken back, said once, and believed again of another process."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from rollout_svc.engines import Endpoint, EngineProfile, SGLangDialect
from rollout_svc.events import CapabilityWithdrawn, EventBus
from rollout_svc.tensors.experts import Layout
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.withdrawal import withdraw
from rollout_svc.workers.worker import Worker, WorkerState

CLAIMS = EngineProfile(dialect="sglang", capabilities=("abort", "experts"), weight_label="0")


def made(state: WorkerState = WorkerState.ACTIVE) -> Worker:
    """A worker that said it can."""
    worker = Worker(
        worker_id="w0",
        endpoint=Endpoint("http://127.0.0.1:1", None, None),
        candidates=(SGLangDialect(),),
        max_batch=None,
        exclusive=True,
        stream=False,
        breaker=Breaker(Random(0)),
        on_change=lambda *_: None,
    )
    introduce(worker)
    worker.version = 0
    worker.become(state, "made so")
    return worker


def introduce(worker: Worker, profile: EngineProfile = CLAIMS) -> None:
    """Have it asked what it is."""
    worker.introduce(worker.dialect, profile)


@pytest.mark.parametrize("state", list(WorkerState))
async def test_it_is_said_once_and_only_one_in_traffic_is_turned_away(state: WorkerState) -> None:
    """Whoever is out already has another reason, and is asked what it is before it comes back."""
    said: list[CapabilityWithdrawn] = []
    worker, bus = made(state), EventBus()
    bus.subscribe(CapabilityWithdrawn, said.append)
    for _ in range(3):
        withdraw(worker, "experts", "sent none", bus)
    assert said == [CapabilityWithdrawn("w0", "experts", "sent none")]
    assert worker.state is (WorkerState.RECOVERING if state is WorkerState.ACTIVE else state)
    assert worker.capabilities == ("abort",)
    if state is WorkerState.ACTIVE:
        assert worker.reason == "unfit: w0 at http://127.0.0.1:1 sent none"
        assert worker.breaker.state == "open"


async def test_the_same_process_is_not_believed_again() -> None:
    """However often it says that it can."""
    worker = made()
    introduce(worker, EngineProfile("sglang", capabilities=("abort", "experts"), weight_label="default"))
    assert worker.withdraw("experts", "sent none")  # it has been given its label since
    introduce(worker)
    assert worker.capabilities == ("abort",)
    assert not worker.withdraw("experts", "sent none")


@pytest.mark.parametrize(
    "change",
    [
        lambda worker: worker.become(WorkerState.DEAD, "gone"),
        lambda worker: worker.restarted("another version"),
        lambda worker: worker.renewed(0.0),
        lambda worker: introduce(worker, EngineProfile("sglang", weight_label="default")),
    ],
    ids=["died", "restarted", "ended", "other weights"],
)
async def test_another_process_is_believed(change: Callable[[Worker], None]) -> None:
    """It may have been started with the switch this time."""
    worker = made()
    worker.withdraw("experts", "sent none")
    change(worker)
    introduce(worker)
    assert worker.capabilities == ("abort", "experts")


async def test_what_an_engine_said_of_its_model_holds() -> None:
    """Weights that were loaded from elsewhere have no config beside them: the routing is still the model's."""
    worker = made()
    introduce(worker, EngineProfile("sglang", experts=Layout(8, 2, 4)))
    introduce(worker, EngineProfile("sglang", experts=Layout(top_k=3)))
    assert worker.profile is not None
    assert worker.profile.experts == Layout(8, 3, 4)
    introduce(worker, EngineProfile("sglang"))
    assert worker.profile.experts == Layout(8, 3, 4)
