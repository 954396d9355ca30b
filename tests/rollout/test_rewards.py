"""Rewards added up in any order are what they are all at once."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.rollout.rewards import RewardSum

rewards = st.lists(st.floats(-1e6, 1e6), max_size=12)


@given(st.lists(rewards, max_size=6))
def test_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    """Mean and deviation of sums that are added are those of everything that went in."""
    whole = [value for part in parts for value in part]
    total = sum(map(RewardSum.of, parts), RewardSum())
    assert total.count == len(whole)
    if whole:
        assert total.mean == pytest.approx(statistics.fmean(whole), abs=1e-6)
        assert total.std == pytest.approx(statistics.pstdev(whole), rel=1e-6, abs=1e-3)


@given(rewards)
def test_one_lot_is_exact(lot: list[float]) -> None:
    """Without anything to add, the figures are the library's own, to the last bit of the mean."""
    total = RewardSum.of(lot) + RewardSum()
    assert total == RewardSum() + RewardSum.of(lot)
    assert total.mean == (statistics.fmean(lot) if lot else 0.0)
    assert RewardSum().std == 0.0
