"""The circuit breaker: when it opens, for how long, and what closes it again."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.workers.breaker import BASE_S, CAP_S, THRESHOLD, Breaker

seeds = st.integers(0, 1000)


def opened(breaker: Breaker, now: float = 0.0) -> Breaker:
    """Fail it, by samples of their own, until it opens."""
    while breaker.state != "open":
        breaker.failed(now, f"s{breaker.failures}", hard=False)
    return breaker


@given(seeds, st.integers(1, 50))
def test_one_poison_sample_cannot_open_it(seed: int, times: int) -> None:
    """However often the same sample fails softly, it counts once."""  # P20
    breaker = Breaker(Random(seed))
    assert not any(breaker.failed(0.0, "poison", hard=False) for _ in range(times))
    assert (breaker.state, breaker.failures) == ("closed", 1)


@pytest.mark.parametrize("hard", [True, False])
def test_three_failures_in_a_row_open_it(hard: bool) -> None:
    """Soft failures of as many samples open it, hard ones of a single sample do too; only the last call says so."""
    breaker = Breaker(Random(0))
    told = [breaker.failed(0.0, "same" if hard else f"s{n}", hard=hard) for n in range(THRESHOLD)]
    assert told == [False] * (THRESHOLD - 1) + [True]
    assert breaker.state == "open"


def test_an_answer_in_between_forgets_the_failures() -> None:
    """Failures in a row count, and a sample that failed before an answer may count again after it."""
    breaker = Breaker(Random(0))
    for _ in range(5):
        for sample in ("a", "b"):
            assert not breaker.failed(0.0, sample, hard=False)
        breaker.succeeded()
    assert (breaker.state, breaker.failures) == ("closed", 0)


@given(seeds, st.floats(0, 1e6), st.integers(1, 12))
def test_the_back_off_doubles_up_to_its_cap(seed: int, now: float, trials: int) -> None:
    """Each failed trial waits twice as long, jittered to no less than half, never past the cap."""  # P20
    breaker = opened(Breaker(Random(seed)), now)
    for trial in range(trials):
        longest = min(CAP_S, BASE_S * 2**trial)
        assert longest / 2 - 1e-6 <= breaker.retry_at - now <= longest + 1e-6
        breaker.half_open()
        assert breaker.failed(now, "any", hard=False)
        assert breaker.state == "open"


def test_a_good_trial_starts_over() -> None:
    """After an answer the next back-off is the shortest again."""  # P19
    breaker = opened(Breaker(Random(0)))
    for _ in range(6):
        breaker.half_open()
        breaker.failed(0.0, "s", hard=True)
    breaker.half_open()
    breaker.succeeded()
    assert (breaker.state, breaker.opened) == ("closed", 0)
    assert opened(breaker).retry_at <= BASE_S


def test_while_open_failures_change_nothing() -> None:
    """Requests that were under way when it opened neither lengthen the back-off nor open it again."""
    breaker = opened(Breaker(Random(0)))
    before = (breaker.retry_at, breaker.opened, breaker.failures)
    assert not breaker.failed(5.0, "late", hard=True)
    assert (breaker.retry_at, breaker.opened, breaker.failures) == before


def test_no_exponent_grows_without_bound() -> None:
    """A worker that is away for days is asked again at the cap."""
    breaker = Breaker(Random(0))
    for _ in range(5000):
        breaker.trip(0.0)
    assert CAP_S / 2 <= breaker.retry_at <= CAP_S


def test_a_proved_worker_is_not_tried_with_one_request() -> None:
    """It is half open all the same: the next failure opens it, for longer than before, and proves nothing."""  # P19
    breaker = opened(Breaker(Random(0)))
    breaker.half_open(proved=True)
    assert breaker.proved
    assert breaker.failed(0.0, "s", hard=False)
    assert (breaker.state, breaker.opened) == ("open", 2)
    breaker.half_open()
    assert not breaker.proved


@given(seeds, st.floats(0, 1e6), st.integers(1, 100))
def test_where_nobody_is_it_is_looked_at_again_soon(seed: int, now: float, times: int) -> None:
    """However long nobody is there: the wait does not grow, nor does what a failed trial costs after."""  # P19
    breaker = opened(Breaker(Random(seed)), now)
    for _ in range(times):
        breaker.look_again(now, 1.0)
        assert 0.5 - 1e-6 <= breaker.retry_at - now <= 1.0 + 1e-6
    assert (breaker.state, breaker.opened) == ("open", 1)
