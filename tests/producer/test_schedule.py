"""What the producer decides: inside its bounds, never without a worker or a gate."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.producer.schedule import Counts, decide

counts = st.builds(
    Counts,
    gate_open=st.booleans(),
    active_workers=st.integers(0, 4),
    generating=st.integers(0, 40),
    unsettled_groups=st.integers(0, 20),
    continuable=st.integers(0, 3),
    buffer_full=st.booleans(),
)
bounds = st.tuples(st.integers(0, 16), st.integers(0, 16))


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
        assert not now.buffer_full
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
        "buffer_full": now.buffer_full and not now.continuable,
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
