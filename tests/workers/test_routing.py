"""Routing: only to workers that accept, and among those as the policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_svc.config import Routing
from rollout_svc.engines import Endpoint, SGLangDialect
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.routing import HOMES, Router, group_affinity, least_tokens, round_robin
from rollout_svc.workers.worker import EngineCall, Worker, WorkerState

NONE: frozenset[str] = frozenset()
POLICIES: tuple[Routing, ...] = get_args(Routing)
Policy = Callable[[Iterable[Worker], frozenset[str]], Worker | None]


class Look(NamedTuple):
    """What a worker looks like to the router."""

    state: WorkerState = WorkerState.ACTIVE
    held: bool = False
    limit: int = 4
    calls: int = 0
    breaker: str = "closed"
    answered: int = 0
    tokens: int = 0
    turn: int = 0


looks = st.builds(
    Look,
    state=st.sampled_from([*WorkerState, WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.ACTIVE]),
    held=st.sampled_from([False, False, False, True]),
    limit=st.integers(0, 4),
    calls=st.integers(0, 4),
    breaker=st.sampled_from(["closed", "closed", "half_open"]),
    answered=st.integers(0, 3),
    tokens=st.integers(0, 40),
    turn=st.integers(0, 9),
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
    worker.tokens, worker.turn = look.tokens, look.turn
    if look.breaker == "half_open":
        worker.breaker.half_open()
    for number in range(look.calls):
        take(worker, str(number), 0)
    return worker


def make_fleet(*fleet: Look) -> dict[str, Worker]:
    """Make workers `w0`, `w1` and so on."""
    return {f"w{number}": make_worker(f"w{number}", look) for number, look in enumerate(fleet)}


def take(worker: Worker, name: str, tokens: int) -> None:
    """Have a worker run a call."""
    worker.calls[name] = EngineCall(name, "s", "train", 0, 0.0)
    worker.tokens += tokens


def may_take(look: Look) -> bool:
    """Say from the look alone whether a request may be sent: one at a time where the breaker only tries."""
    limit = look.limit if look.breaker == "closed" else min(1, look.limit)
    return look.state is WorkerState.ACTIVE and not look.held and look.calls < limit


# -- every policy --------------------------------------------------------------------------------------------


@given(fleets, avoided, st.sampled_from(POLICIES), st.integers(0, 5))
def test_only_a_worker_that_accepts_is_chosen(
    fleet: list[Look], avoid: frozenset[str], policy: Routing, home: int
) -> None:
    """Somebody is chosen exactly when somebody may take it, and the one who just failed only when alone."""  # P9
    workers = make_fleet(*fleet)
    able = {worker_id for worker_id, look in zip(workers, fleet, strict=True) if may_take(look)}
    router = Router(policy)
    if f"w{home}" in workers:
        router._remember("g", workers[f"w{home}"])
    chosen = router.choose(workers, "g", avoid)
    if not able:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.worker_id in able
    assert chosen.worker_id not in avoid or able <= avoid


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("breaker", ["closed", "half_open"])
def test_a_worker_without_a_limit_takes_nothing(policy: Routing, breaker: str) -> None:
    """A worker whose limit is 0, or not known yet, counts as full, also where its breaker would let a trial through."""
    assert Router(policy).choose(make_fleet(Look(limit=0, breaker=breaker)), "g", NONE) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.ACTIVE])
def test_one_that_is_leaving_or_away_gets_nothing_new(policy: Routing, state: WorkerState) -> None:
    """DRAINING and the like take nothing, not even a sibling of what they run."""
    workers = make_fleet(Look(), Look(tokens=10**6, calls=3, turn=99))
    router = Router(policy)
    router._remember("g", workers["w0"])
    workers["w0"].become(state, "leaving")
    assert router.choose(workers, "g", NONE) is workers["w1"]


# -- least tokens --------------------------------------------------------------------------------------------


@given(fleets, avoided)
def test_the_least_loaded_is_chosen(fleet: list[Look], avoid: frozenset[str]) -> None:
    """None that could have been chosen has fewer tokens in flight for its limit, nor answered fewer at a tie."""
    workers = make_fleet(*fleet).values()
    chosen = least_tokens(workers, avoid)
    if chosen is None:
        return
    for other in workers:
        if other.accepts and (other.worker_id in avoid) == (chosen.worker_id in avoid):
            assert (chosen.tokens / chosen.limit, chosen.answered) <= (other.tokens / other.limit, other.answered)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=80),
)
def test_tokens_are_balanced_by_limits(limits: list[int], calls: list[tuple[int, bool]]) -> None:
    """Among workers that had room, no load is ahead of another by more than the one call that was given last."""
    workers = make_fleet(*(Look(limit=limit) for limit in limits))
    full: set[str] = set()
    for number, (tokens, _) in enumerate(calls):
        chosen = least_tokens(workers.values())
        if chosen is None:
            break
        take(chosen, str(number), tokens)
        if not chosen.accepts:
            full.add(chosen.worker_id)
    largest = max((tokens for tokens, _ in calls), default=0)
    for one in workers.values():
        for other in workers.values():
            if other.worker_id not in full:
                assert one.tokens / one.limit <= other.tokens / other.limit + largest / one.limit


def test_a_larger_worker_gets_more() -> None:
    """Twice the limit, twice the tokens."""
    workers = make_fleet(Look(limit=100), Look(limit=200))
    for number in range(90):
        chosen = least_tokens(workers.values())
        assert chosen is not None
        take(chosen, str(number), 10)
    assert [worker.tokens for worker in workers.values()] == [300, 600]


def test_a_long_call_counts_for_what_it_is() -> None:
    """Load is tokens and not requests: three short calls leave more room than a long one."""
    workers = make_fleet(Look(calls=3, tokens=60), Look(calls=1, tokens=4000))
    assert least_tokens(workers.values()) is workers["w0"]


# -- affinity ------------------------------------------------------------------------------------------------


@given(fleets, avoided, st.integers(0, 5))
def test_siblings_go_home_or_to_the_least_loaded(fleet: list[Look], avoid: frozenset[str], home: int) -> None:
    """Home while it accepts and did not just fail this sample, else as the default policy."""
    workers = make_fleet(*fleet)
    first = workers.get(f"w{home}")
    chosen = group_affinity(workers.values(), avoid, first)
    if first is not None and first.accepts and first.worker_id not in avoid:
        assert chosen is first
    else:
        assert chosen is least_tokens(workers.values(), avoid)


def test_siblings_share_a_worker_and_groups_are_spread() -> None:
    """Four groups of four on two workers: each group on one, two groups on each."""
    workers, router = make_fleet(Look(limit=16), Look(limit=16)), Router("group_affinity")
    homes: dict[str, set[str]] = {}
    for number in range(16):
        group = f"g{number // 4}"
        chosen = router.choose(workers, group, NONE)
        assert chosen is not None
        homes.setdefault(group, set()).add(chosen.worker_id)
        take(chosen, str(number), 100)
    assert all(len(found) == 1 for found in homes.values())
    assert Counter(min(found) for found in homes.values()) == {"w0": 2, "w1": 2}


def test_a_full_home_stays_home() -> None:
    """Where there is no room a sibling goes elsewhere; the next goes home again once there is."""
    workers, router = make_fleet(Look(limit=1), Look(limit=8, tokens=999)), Router("group_affinity")
    first = router.choose(workers, "g", NONE)
    assert first is workers["w0"]
    take(first, "a", 10)
    assert router.choose(workers, "g", NONE) is workers["w1"]
    first.calls.clear()
    assert router.choose(workers, "g", NONE) is first


def test_a_home_that_is_gone_is_replaced() -> None:
    """When the worker leaves, dies or is replaced, the group settles where its next request goes."""
    workers, router = make_fleet(Look(), Look(tokens=1), Look(tokens=2)), Router("group_affinity")
    assert router.choose(workers, "g", NONE) is workers["w0"]
    del workers["w0"]
    assert router.choose(workers, "g", NONE) is workers["w1"]
    workers["w1"].become(WorkerState.DEAD, "gone")
    assert router.choose(workers, "g", NONE) is workers["w2"]
    workers["w1"].become(WorkerState.ACTIVE, "back")
    assert router.choose(workers, "g", NONE) is workers["w2"]


def test_what_is_remembered_is_bounded() -> None:
    """Groups without end leave no more behind than the bound, the oldest forgotten first."""
    workers, router = make_fleet(Look()), Router("group_affinity")
    for number in range(HOMES + 10):
        router.choose(workers, f"g{number}", NONE)
    assert len(router._homes) == HOMES
    assert "g9" not in router._homes
    assert "g10" in router._homes


# -- round robin ---------------------------------------------------------------------------------------------


@given(fleets, avoided)
def test_the_turn_that_is_longest_ago_is_next(fleet: list[Look], avoid: frozenset[str]) -> None:
    """Nobody that could have been chosen has waited longer."""
    workers = make_fleet(*fleet).values()
    chosen = round_robin(workers, avoid)
    for other in workers if chosen is not None else ():
        if other.accepts and chosen is not None and (other.worker_id in avoid) == (chosen.worker_id in avoid):
            assert chosen.turn <= other.turn


def test_turns_go_around() -> None:
    """Each in the order of the fleet, again and again, whatever it runs."""
    workers, router = make_fleet(Look(tokens=9), Look(tokens=5), Look()), Router("round_robin")
    order = [str(router.choose(workers, "g", NONE)).split()[1] for _ in range(7)]
    assert order == ["w0", "w1", "w2", "w0", "w1", "w2", "w0"]


# -- over time -----------------------------------------------------------------------------------------------


class Fleet(RuleBasedStateMachine):
    """Workers come, go, fill and rest while requests arrive; whoever stays and has room is never passed over."""

    policy: Routing = "least_tokens"

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(self.policy)
        self.workers: dict[str, Worker] = {}
        self.since: dict[str, Counter[str]] = {}  # of each that accepts: who was chosen since its own last turn
        self.made = 0

    @rule(limit=st.integers(1, 4))
    def join(self, limit: int) -> None:
        """A worker joins."""
        self.made += 1
        worker_id = f"w{self.made}"
        self.workers[worker_id] = make_worker(worker_id, Look(limit=limit))
        self.router.forget()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """One leaves."""
        del self.workers[data.draw(st.sampled_from(sorted(self.workers)))]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), held=st.booleans())
    def rest(self, data: Any, held: bool) -> None:
        """One is held back, or let go on."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        worker.held = held
        self.router.note(worker)

    @precondition(lambda self: any(worker.calls for worker in self.workers.values()))
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """A call ends."""
        worker = self.workers[data.draw(st.sampled_from(sorted(w for w in self.workers if self.workers[w].calls)))]
        worker.calls.popitem()
        if not worker.calls:
            worker.tokens = 0
        self.router.note(worker)

    @rule(tokens=st.integers(1, 50), group=st.integers(0, 2))
    def send(self, tokens: int, group: int) -> None:
        """A request arrives."""
        accepting = [worker for worker in self.workers.values() if worker.accepts]
        by_definition = self.defined(accepting)
        chosen = self.router.choose(self.workers, f"g{group}", NONE)
        assert (chosen is None) == (not accepting)
        if chosen is None:
            return
        assert by_definition is None or chosen is by_definition
        self.made += 1
        take(chosen, f"c{self.made}", tokens)
        chosen.answered += 1
        for worker in accepting:
            self.since.setdefault(worker.worker_id, Counter())[chosen.worker_id] += 1
        self.since[chosen.worker_id] = Counter()

    def defined(self, accepting: list[Worker]) -> Worker | None:
        """Whom a look at everybody would choose; a home decides otherwise."""
        if self.policy == "group_affinity":
            return None
        return (round_robin if self.policy == "round_robin" else least_tokens)(accepting)

    @invariant()
    def nobody_starves(self) -> None:
        """Somebody who accepts all along is passed over by another only so often as the policy allows."""
        self.since = {
            worker_id: passed
            for worker_id, passed in self.since.items()
            if worker_id in self.workers and self.workers[worker_id].accepts
        }
        if self.policy == "round_robin":
            for passed in self.since.values():
                assert all(times <= 1 for other, times in passed.items() if other in self.since)


class RoundRobinFleet(Fleet):
    """Fairness of turns in a fleet that changes."""

    policy: Routing = "round_robin"


class AffinityFleet(Fleet):
    """The same with homes."""

    policy: Routing = "group_affinity"


TestLeastTokensFleet = Fleet.TestCase
TestRoundRobinFleet = RoundRobinFleet.TestCase
TestAffinityFleet = AffinityFleet.TestCase


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_an_idle_worker_is_not_starved(limits: list[int], rounds: int, data: Any) -> None:
    """Where calls end at once and nobody is ever loaded, everyone is given the same number of them."""
    workers = make_fleet(*(Look(limit=limit) for limit in limits))
    for _ in range(rounds * len(limits)):
        chosen = least_tokens(data.draw(st.permutations(list(workers.values()))))
        assert chosen is not None
        chosen.answered += 1
    assert {worker.answered for worker in workers.values()} == {rounds}
