"""How long no worker has been in traffic: what counts, what starts the count anew, and when it is too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.workers.absence import Absence


def there(absence: Absence, now: float, answered: int = 0) -> None:
    """Somebody is in traffic."""
    assert absence.look(now, missed=True, present=True, answered=answered) is None


def away(absence: Absence, now: float, answered: int = 0) -> float | None:
    """Nobody is in traffic; when will it have been too long?"""
    return absence.look(now, missed=True, present=False, answered=answered)


def test_without_a_limit_it_only_counts() -> None:
    """Null waits for ever, and still says for how long."""
    absence = Absence(None)
    assert away(absence, 10.0) is None
    assert absence.lasted(5000.0) == 4990.0
    there(absence, 6000.0)
    assert absence.lasted(6001.0) is None


def test_it_is_too_long_after_the_limit() -> None:
    """The limit counts from when the last one left, however often one looks."""
    absence = Absence(60.0)
    there(absence, 0.0)
    assert away(absence, 100.0) == 160.0
    assert away(absence, 130.0) == 160.0


def test_a_worker_that_works_starts_it_anew() -> None:
    """One answer, and the whole time is there again."""
    absence = Absence(60.0)
    assert away(absence, 0.0) == 60.0
    there(absence, 50.0)
    assert away(absence, 55.0, answered=1) == 115.0


def test_one_that_only_comes_to_fail_again_does_not() -> None:
    """Trials that end without an answer are no return: the count goes on, less the time of the trials."""
    absence = Absence(60.0)
    assert away(absence, 0.0) == 60.0
    for trial in range(5):
        there(absence, 10.0 * trial + 10.0)
        assert away(absence, 10.0 * trial + 11.0) == 61.0 + trial


def test_one_that_stayed_was_there() -> None:
    """A worker that had no work is not one that failed: having stayed for the limit, it has the whole time again."""
    absence = Absence(60.0)
    away(absence, 0.0)
    there(absence, 50.0)
    there(absence, 90.0)
    assert away(absence, 110.0) == 170.0


def test_a_pause_stops_it_and_does_not_start_it_anew() -> None:
    """A trainer that pauses and resumes all the time is still told."""
    absence = Absence(60.0)
    away(absence, 0.0)
    assert absence.look(40.0, missed=False, present=False, answered=0) is None
    assert absence.lasted(41.0) is None
    assert away(absence, 1000.0) == 1020.0


@given(
    st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans(), st.booleans(), st.integers(0, 1)), max_size=40),
    st.floats(1.0, 100.0),
)
def test_it_never_ends_early(steps: list[tuple[float, bool, bool, int]], limit: float) -> None:
    """Whatever happens: what is counted is time in which somebody was missed and nobody there, and only that."""
    absence, now, answered, empty_s, was_empty = Absence(limit), 0.0, 0, 0.0, False
    for seconds, missed, present, more in steps:
        now += seconds
        empty_s += seconds if was_empty else 0.0
        answered += more
        end = absence.look(now, missed=missed, present=present, answered=answered)
        was_empty = missed and not present
        assert (end is not None) == was_empty
        if end is not None:
            assert end >= now + limit - empty_s - 1e-6
            assert end <= now + limit + 1e-6
