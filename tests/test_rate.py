"""The bucket of tokens: never more than the rate allows, and never less than it promises."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.judging.rate import TokenBucket

rates = st.floats(1, 100_000)
steps = st.lists(st.floats(-1, 5), max_size=60)


@given(st.floats(1, 600), steps)
def test_no_more_than_the_rate(per_minute: float, waits: list[float]) -> None:
    """In every stretch of time no more is let through than the burst and what fills meanwhile."""
    bucket = TokenBucket(per_minute)
    now, latest = 1000.0, -math.inf
    taken = []
    for wait in waits:
        now += wait
        latest = max(now, latest)
        while bucket.take(now):
            taken.append(latest)
    for first, began in enumerate(taken):
        for last in range(first, len(taken), 5):
            assert last - first + 1 <= bucket.burst + (taken[last] - began) * per_minute / 60 + 1e-3


@given(rates, st.integers(1, 50))
def test_whoever_waits_as_told_finds_a_token(per_minute: float, calls: int) -> None:
    """The wait is as long as it has to be, and no call is told to wait longer than one token takes."""
    bucket = TokenBucket(per_minute)
    now = began = 5.0
    for _ in range(calls):
        wait_s = bucket.wait_s(now)
        assert 0 <= wait_s <= 60 / per_minute + 1e-9
        now += wait_s
        assert bucket.take(now + 1e-9)
    assert now - began == pytest.approx(max(0.0, calls - bucket.burst) * 60 / per_minute, abs=1e-3 * calls)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    """Time that is seen twice fills once."""
    bucket = TokenBucket(60)
    assert bucket.take(10)
    assert not bucket.take(5)
    assert not bucket.take(10)
    assert bucket.take(11)
    assert repr(bucket) == "<TokenBucket 0.00 of 1, 1/s>"
