"""Routing: only to workers that accept, and to the least loaded of them."""

from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import Endpoint, SGLangDialect
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.routing import choose
from rollout_svc.workers.worker import EngineCall, Worker, WorkerState


class Look(NamedTuple):
    """What a worker looks like to the router."""

    state: WorkerState
    held: bool
    limit: int
    calls: int
    breaker: str
    answered: int


looks = st.builds(
    Look,
    state=st.sampled_from([*WorkerState, WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.ACTIVE]),
    held=st.sampled_from([False, False, False, True]),
    limit=st.integers(0, 4),
    calls=st.integers(0, 4),
    breaker=st.sampled_from(["closed", "closed", "half_open"]),
    answered=st.integers(0, 3),
)
fleets = st.lists(looks, max_size=6)
avoided = st.sets(st.integers(0, 5)).map(lambda numbers: frozenset(f"w{number}" for number in numbers))


def make_worker(worker_id: str, look: Look) -> Worker:
    """Make a worker that looks like this."""
    worker = Worker(
        worker_id=worker_id,
        endpoint=Endpoint("http://127.0.0.1:1", None, None),
        candidates=(SGLangDialect(),),
        max_batch=None,
        exclusive=True,
        stream=False,
        breaker=Breaker(Random(0)),
        on_change=lambda *_: None,
    )
    worker.become(look.state, "made so")
    worker.held, worker.limit, worker.answered = look.held, look.limit, look.answered
    if look.breaker == "half_open":
        worker.breaker.half_open()
    for number in range(look.calls):
        worker.calls[str(number)] = EngineCall(str(number), "s", "train", 0, 0.0)
    return worker


def may_take(look: Look) -> bool:
    """Say from the look alone whether a request may be sent: one at a time where the breaker only tries."""
    limit = look.limit if look.breaker == "closed" else min(1, look.limit)
    return look.state is WorkerState.ACTIVE and not look.held and look.calls < limit


@given(fleets, avoided)
def test_only_a_worker_that_accepts_is_chosen(fleet: list[Look], avoid: frozenset[str]) -> None:
    """Somebody is chosen exactly when somebody may take it, and the one who just failed only when alone."""  # P9
    workers = [make_worker(f"w{number}", look) for number, look in enumerate(fleet)]
    able = {worker.worker_id: look for worker, look in zip(workers, fleet, strict=True) if may_take(look)}
    chosen = choose(iter(workers), avoid)
    if not able:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.worker_id in able
    assert chosen.worker_id not in avoid or set(able) <= avoid


@given(fleets, avoided)
def test_the_least_loaded_is_chosen(fleet: list[Look], avoid: frozenset[str]) -> None:
    """None that could have been chosen instead has a smaller share of its limit in use, nor answered fewer at a tie."""
    workers = [make_worker(f"w{number}", look) for number, look in enumerate(fleet)]
    chosen = choose(workers, avoid)
    if chosen is None:
        return
    for other in workers:
        if other.accepts and (other.worker_id in avoid) == (chosen.worker_id in avoid):
            assert (chosen.load, chosen.answered) <= (other.load, other.answered)


@pytest.mark.parametrize("breaker", ["closed", "half_open"])
def test_a_worker_without_a_limit_takes_nothing(breaker: str) -> None:
    """A worker whose limit is 0, or not known yet, counts as full, also where its breaker would let a trial through."""
    worker = make_worker("w", Look(WorkerState.ACTIVE, False, 0, 0, breaker, 0))
    assert (worker.accepts, worker.load) == (False, 1.0)
