"""Standings: the worker that a look at everybody would choose, without the look."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.workers.routing import least_tokens
from rollout_svc.workers.standings import Rank, Standings
from rollout_svc.workers.worker import Worker
from tests.support.counting import operations
from tests.workers.test_routing import Look, avoided, fleets, make_fleet, take

NONE: frozenset[str] = frozenset()


def load(worker: Worker) -> Rank:
    """The rank of the default policy."""
    return worker.tokens / worker.limit, worker.answered


@given(fleets, avoided)
def test_a_first_look_chooses_as_the_policy_is_defined(fleet: list[Look], avoid: frozenset[str]) -> None:
    """Of any fleet the one that the definition names, also where some are to be avoided."""
    workers = make_fleet(*fleet)
    assert Standings(load).best(workers, avoid) is least_tokens(workers.values(), avoid)


@given(st.integers(1, 6), st.data())
def test_what_was_said_is_enough(size: int, data: Any) -> None:
    """Calls begin and end at random, and every choice is the one the definition makes of the whole fleet."""
    workers = make_fleet(*(Look(limit=data.draw(st.integers(1, 5))) for _ in range(size)))
    standings, made = Standings(load), 0
    for _ in range(60):
        worker = workers[f"w{data.draw(st.integers(0, size - 1))}"]
        if worker.calls and data.draw(st.booleans()):
            worker.calls.popitem()
            worker.tokens = max(0, worker.tokens - 7)
            worker.answered += 1
            standings.note(worker)
            continue
        avoid = frozenset({worker.worker_id}) if data.draw(st.booleans()) else NONE
        chosen = standings.best(workers, avoid)
        assert chosen is least_tokens(workers.values(), avoid)
        if chosen is not None:
            made += 1
            take(chosen, f"c{made}", data.draw(st.integers(1, 30)))


def test_what_nobody_said_is_found_out() -> None:
    """A worker that has room again without a word is chosen after as many choices as there are workers."""  # P19
    workers = make_fleet(*(Look(limit=100) for _ in range(10)))
    workers["w3"].held = True
    standings = Standings(load)
    assert standings.best(workers, NONE) is workers["w0"]
    for number, worker in enumerate(workers.values()):
        take(worker, str(number), 0 if worker.held else 50)
    workers["w3"].held = False
    found = [standings.best(workers, NONE) for _ in range(11)]
    assert found[-1] is workers["w3"]


def test_entries_are_bounded() -> None:
    """However often ranks change between two choices, a few entries a worker are all there is."""
    workers = make_fleet(*(Look(limit=100, tokens=10**6) for _ in range(8)))
    standings = Standings(load)
    standings.best(workers, NONE)
    for _ in range(1000):
        for worker in workers.values():
            worker.tokens -= 1
            standings.note(worker)
    assert len(standings) <= 64 + 4 * 8 + 1


def test_a_choice_does_not_look_at_everybody() -> None:
    """Over a hundred choices and as many calls that end, a fleet 16 times as large costs less than twice as much."""

    def cost(size: int) -> float:
        workers = make_fleet(*(Look(limit=100) for _ in range(size)))
        standings = Standings(load)
        rounds = 2 * size  # looks at the whole fleet are part of it

        def use() -> None:
            for number in range(rounds):
                chosen = standings.best(workers, NONE)
                assert chosen is not None
                take(chosen, str(number), 10)
                if number % 2:
                    chosen.calls.popitem()
                    chosen.tokens -= 10
                    standings.note(chosen)

        return operations(use) / rounds

    assert cost(512) < 2 * cost(32)
