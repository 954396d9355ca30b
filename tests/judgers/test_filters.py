"""The filters that come with the service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_judgers.all_equal import AllEqual
from rollout_svc.filtering import FilterDesk, view_of
from rollout_svc.ledger import Ledger
from rollout_svc.sample import SampleStatus
from tests.support.groups import make_group, run_to

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def verdict(rewards: list[float], plugin: AllEqual) -> str | None:
    group = make_group(Ledger(), size=len(rewards))
    group.start()
    for sample, reward in zip(group.samples, rewards, strict=True):
        run_to(sample, SampleStatus.COMPLETED, reward)
    return plugin.keep(view_of(group))


@given(numbers)
def test_all_equal_drops_what_does_not_differ(rewards: list[float]) -> None:
    """A group goes exactly when all its rewards are the same."""
    assert verdict(rewards, AllEqual()) == ("all_equal" if len(set(rewards)) == 1 else None)


@given(numbers, st.floats(0, 200))
def test_all_equal_knows_a_tolerance(rewards: list[float], tolerance: float) -> None:
    """With a tolerance, rewards that lie no further apart count as equal."""
    apart = max(rewards) - min(rewards)
    assert verdict(rewards, AllEqual(tolerance=tolerance)) == ("all_equal" if apart <= tolerance else None)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_is_a_distance(tolerance: float) -> None:
    """P35: a tolerance that is none is refused."""
    with pytest.raises(ValueError, match="tolerance"):
        AllEqual(tolerance=tolerance)


def test_all_equal_is_asked_in_place() -> None:
    """It compares a few numbers: no thread and no task for that."""
    assert FilterDesk(name="all_equal", plugin=AllEqual(), timeout_s=1.0).inline
