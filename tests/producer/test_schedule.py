"""What the producer decides: inside its bounds, never without a worker or a gate, mixed as asked for."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.producer.schedule import Counts, decide, next_task

counts = st.builds(
    Counts,
    gate_open=st.booleans(),
    active_workers=st.integers(0, 4),
    generating=st.integers(0, 40),
    unsettled_groups=st.integers(0, 20),
    continuable=st.integers(0, 3),
)
bounds = st.tuples(st.integers(0, 16), st.integers(0, 16))
weights = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1)


@given(counts, bounds)
def test_it_starts_only_what_it_may(now: Counts, bound: tuple[int, int]) -> None:
    """Nothing starts with the gate closed, without a worker or at the target, nor is admitted at its bound."""  # P18
    required, max_groups = bound
    decision = decide(now, required=required, max_groups=max_groups)
    if decision.action != "wait":
        assert now.gate_open
        assert now.active_workers > 0
        assert now.generating < required * now.active_workers
        assert decision.reason == ""
    if decision.action == "admit":
        assert now.unsettled_groups < max_groups
        assert now.continuable == 0
    if decision.action == "continue":
        assert now.continuable > 0


@given(counts, bounds)
def test_it_waits_for_a_reason_that_is_the_case(now: Counts, bound: tuple[int, int]) -> None:
    """A producer that waits says the one thing that has to change."""  # P18
    required, max_groups = bound
    decision = decide(now, required=required, max_groups=max_groups)
    holds = {
        "gate_closed": not now.gate_open,
        "no_worker": now.active_workers == 0,
        "target_reached": now.generating >= required * now.active_workers,
        "max_groups": now.unsettled_groups >= max_groups and not now.continuable,
        "": True,
    }
    assert holds[decision.reason]
    assert (decision.action == "wait") == (decision.reason != "")


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 16), st.integers(1, 4), st.lists(st.booleans()))
def test_followed_step_by_step_it_stays_in_bounds(
    workers: int, required: int, max_groups: int, size: int, ends: list[bool]
) -> None:
    """A producer that does what it is told fills the target, and its groups never exceed theirs."""
    running = unsettled = 0
    for end in [*ends, *([False] * 80)]:
        if end and running:
            running, unsettled = running - 1, unsettled - 1
        now = Counts(True, workers, running * size, unsettled, 0)
        if decide(now, required=required, max_groups=max_groups).action == "admit":
            running, unsettled = running + 1, unsettled + 1
        assert unsettled <= max_groups
        assert running * size < required * workers + size
    assert unsettled == max_groups or running * size >= required * workers


@given(weights, st.integers(1, 300))
def test_the_mix_is_the_one_asked_for(shares: dict[str, float], steps: int) -> None:
    """At every moment each task is less than one group per other task away from its share."""  # P33
    admitted = dict.fromkeys(shares, 0)
    for _ in range(steps):
        task = next_task(admitted, shares)
        assert task is not None
        admitted[task] += 1
    total = sum(shares.values())
    for task, share in shares.items():
        assert abs(admitted[task] - steps * share / total) < len(shares)


@given(weights, weights)
def test_a_task_without_prompts_is_not_waited_for(there: dict[str, float], gone: dict[str, float]) -> None:
    """Only a task that has a prompt to give is named, whatever others are behind."""
    admitted = dict.fromkeys(there, 1000)
    assert next_task(admitted, there) in there
    assert next_task(dict.fromkeys(gone, 3), {}) is None


def test_a_slow_task_is_not_starved() -> None:
    """A task that rarely has a prompt gets the next turn whenever it has one."""  # P33
    admitted = {"fast": 0, "slow": 0}
    for step in range(100):
        there = {"fast": 1.0, "slow": 1.0} if step % 10 == 9 else {"fast": 1.0}
        task = next_task(admitted, there)
        assert task == ("slow" if step % 10 == 9 else "fast")
        admitted[task] += 1
