"""Caution: after failures in a row little is admitted, and one success ends it."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.producer.caution import FIRST_S, LIMIT, LONGEST_S, Caution


def fail(caution: Caution, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        caution.failed("judge_error", now)


@given(st.lists(st.booleans()))
def test_it_begins_after_failures_in_a_row(outcomes: list[bool]) -> None:
    """Prompts rest exactly when the last `LIMIT` groups, or more, failed."""
    caution, in_a_row = Caution(), 0
    for failed in outcomes:
        if failed:
            caution.failed("judge_error", 0.0)
        else:
            caution.finished()
        in_a_row = in_a_row + 1 if failed else 0
        assert caution.resting(0.0) == (in_a_row >= LIMIT)


def test_each_rest_lets_one_through_and_doubles() -> None:
    """0.5 s, 1 s, 2 s … 30 s, with one group after each; only a trial makes the next rest longer."""
    caution, now, rests = Caution(), 100.0, []
    fail(caution, LIMIT, now)
    for _ in range(9):
        assert caution.until is not None
        rests.append(caution.until - now)
        assert caution.resting(caution.until - 0.001)
        now = caution.until
        assert not caution.resting(now)
        caution.admitted(now)
        fail(caution, 20, now)
    assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (rests[0], rests[-1]) == (FIRST_S, LONGEST_S)


def test_one_group_that_finishes_ends_it() -> None:
    """Then it begins from nothing: `LIMIT` failures again, and the first rest is short again."""
    caution = Caution()
    fail(caution, LIMIT)
    caution.admitted(0.5)
    assert caution.finished()
    assert not caution.resting(0.5)
    assert not caution.finished()
    caution.admitted(1.0)
    fail(caution, LIMIT - 1, 1.0)
    assert not caution.resting(1.0)
    fail(caution, 1, 1.0)
    assert caution.until == 1.0 + FIRST_S
    assert caution.reason == "judge_error"
