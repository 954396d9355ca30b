"""What the producer decides: inside its bounds, never without a worker or a gate."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import Strategy, TrainerConfig
from rollout_svc.plan import make_plan
from rollout_svc.producer.schedule import WORDS, Counts, Demand, Rule, TailCounts, decide, make_rule

strategies = st.sampled_from(get_args(Strategy))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Draw the rule of settings that are not refused."""
    interval = draw(st.integers(1, 3))
    bound = draw(st.integers(interval - 1, 4))
    trainer = TrainerConfig(
        train_batch_size=draw(st.integers(1, 5)),
        over_sample_threshold=draw(st.sampled_from((0.0, 0.2, 1.0))),
        max_staleness=bound,
        max_token_staleness=draw(st.none() | st.integers(interval - 1, bound)),
        update_interval=interval,
    )
    plan = make_plan(trainer, [None])
    return make_rule(draw(strategies), trainer, required=draw(st.integers(1, 16)), max_groups=plan.max_groups)


demands = st.builds(Demand, st.integers(0, 6), st.integers(0, 9), st.integers(0, 6))
tails = st.builds(TailCounts, st.booleans(), st.integers(0, 3), st.booleans(), st.booleans(), st.just(2), st.just(1))
counts = st.builds(
    Counts,
    gate_open=st.booleans(),
    active_workers=st.integers(0, 4),
    generating=st.integers(0, 40),
    unsettled_groups=st.integers(0, 20),
    continuable=st.integers(0, 3),
    demand=demands,
    out=st.integers(0, 20),
    ready=st.integers(0, 8),
    tail=tails,
    resting=st.booleans(),
    buffer_full=st.booleans(),
    lacking=st.booleans(),
)


@given(counts, rules())
def test_it_starts_only_what_it_may(now: Counts, rule: Rule) -> None:
    """Nothing starts with the gate closed, without a worker, at the target, or for a step out of reach."""  # P18
    decision = decide(now, rule)
    if decision.action == "wait":
        return
    assert now.gate_open
    assert now.active_workers > 0
    assert now.generating < rule.required * now.active_workers
    assert rule.room(now.demand) > 0
    assert decision.reason == ""
    if rule.strategy == "async":
        assert now.ready < rule.needed(now.demand) or now.lacking
    if decision.action == "admit":
        assert now.unsettled_groups < rule.max_groups
        assert not now.buffer_full
        assert now.continuable == 0
        assert not now.resting
    if decision.action == "continue":
        assert now.continuable > 0


@given(counts, rules())
def test_out_is_never_brought_over_the_limit(now: Counts, rule: Rule) -> None:
    """An admission, of the tail or of a new prompt, leaves at most the limit out; in a round what a batch needs."""
    decision = decide(now, rule)
    if decision.action == "admit" or (decision.action == "tail" and now.tail.on and now.tail.left):
        assert now.out + 1 <= rule.limit(now.demand)
        if now.tail.on:
            assert now.out + 1 <= rule.needed(now.demand)


@given(counts, rules())
def test_nothing_is_admitted_that_must_expire(now: Counts, rule: Rule) -> None:
    """Handed over a batch a step, what is out and the group admitted are within the bound at their turn."""  # P32
    if decide(now, rule).action == "admit" and rule.max_staleness > 0:
        turn = now.demand.next_step + now.out // rule.needed(now.demand)
        assert turn - now.demand.version <= rule.max_staleness
    if decide(now, rule).action == "admit" and rule.strategy == "sync":
        assert now.demand.next_step - now.demand.version < rule.update_interval


@given(counts, rules())
def test_it_waits_for_a_reason_that_is_the_case(now: Counts, rule: Rule) -> None:
    """A producer that waits says the one thing that has to change, and there are words for it."""  # P18 P22
    decision = decide(now, rule)
    needed = rule.needed(now.demand)
    holds = {
        "gate_closed": not now.gate_open,
        "no_worker": now.active_workers == 0,
        "weights": rule.strategy == "sync" and now.demand.next_step - now.demand.version >= rule.update_interval,
        "step_ahead": now.demand.next_step - now.demand.version > rule.serves,
        "batch_ready": rule.strategy == "async" and now.ready >= needed and not now.lacking,
        "target_reached": now.generating >= rule.required * now.active_workers,
        "tail_round": now.tail.on and now.tail.left > 0 and now.out >= needed,
        "max_groups": now.unsettled_groups >= rule.max_groups and not now.continuable,
        "batch_under_way": now.out >= min(rule.limit(now.demand), needed if now.tail.on else 10**9),
        "every_group_fails": now.resting,
        "buffer_full": now.buffer_full and not now.continuable,
        "": True,
    }
    assert holds[decision.reason]
    assert (decision.action == "wait") == (decision.reason != "")
    assert decision.reason == "" or decision.reason in WORDS


@given(counts, rules())
def test_what_the_batch_lacks_does_not_wait_in_the_tail(now: Counts, rule: Rule) -> None:
    """Where nothing may be admitted, groups that are admitted already go on: nobody else can fill the batch."""  # P18
    if now.out < rule.needed(now.demand) and now.tail.gathered_groups and not now.tail.on:
        assert decide(now, rule).reason not in ("max_groups", "buffer_full", "every_group_fails")


@given(rules(), st.integers(0, 9))
def test_whoever_waits_for_a_step_in_reach_is_worked_for(rule: Rule, ahead: int) -> None:
    """The limit is never below what a take of such a step asks for: all that is out being ready would meet it."""
    for asked in range(rule.max_groups + 1):
        demand = Demand(3, 3 + min(ahead, rule.serves), asked)
        if rule.strategy != "sync" or demand.next_step - 3 < rule.update_interval:
            assert rule.limit(demand) >= max(asked, rule.batch)


@given(rules())
def test_the_strategies_differ_in_how_far_ahead_they_run(rule: Rule) -> None:
    """One batch; one and the budget; one for each step that the bound reaches: and less, the fewer steps are left."""
    for behind in range(rule.serves + 2):
        demand, left = Demand(5, 5 + behind), rule.serves + 1 - behind
        surplus = rule.budget if rule.serves == 0 else 0
        expected = {
            "sync": rule.batch if behind < rule.update_interval else 0,
            "async": min(rule.batch + rule.budget, left * rule.batch + surplus) if left > 0 else 0,
            "disaggregated": left * rule.batch + surplus if left > 0 else 0,
        }
        assert rule.limit(demand) == expected[rule.strategy]
    assert rule.room(Demand(5, 2)) == rule.room(Demand(5, 5))  # a step that is past has no more use for it


def test_nothing_is_started_whose_tokens_would_all_be_masked() -> None:
    """Groups may be as old as 4, tokens 1: what is finished now counts at two steps, not five."""  # P32
    trainer = TrainerConfig(train_batch_size=10, over_sample_threshold=0.0, max_staleness=4, max_token_staleness=1)
    rule = make_rule("disaggregated", trainer, required=1, max_groups=50)
    assert [rule.limit(Demand(3, step)) for step in (3, 4, 5)] == [20, 10, 0]


def test_the_budget_is_exact() -> None:
    """A tenth of 30 is 3, whatever the processor makes of 0.1."""
    trainer = TrainerConfig(train_batch_size=30, over_sample_threshold=0.1)
    assert make_rule("async", trainer, required=1, max_groups=1).budget == 3


@given(st.integers(1, 4), rules(), st.integers(1, 4), st.lists(st.booleans()))
def test_followed_step_by_step_it_stays_in_bounds(workers: int, rule: Rule, size: int, ends: list[bool]) -> None:
    """A producer that does what it is told fills the target, and its groups never exceed theirs."""
    running, demand = 0, Demand(0, 0)
    for end in [*ends, *([False] * 80)]:
        if end and running:
            running -= 1
        now = Counts(True, workers, running * size, running, 0, demand, out=running)
        if decide(now, rule).action == "admit":
            running += 1
        assert running <= min(rule.max_groups, rule.limit(demand))
        assert running * size < rule.required * workers + size
    assert running == min(rule.max_groups, rule.limit(demand)) or running * size >= rule.required * workers
