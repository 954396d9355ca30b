"""The shape of growth: what rises like a leak, and what only looks like it for a moment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.observe.memory.shape import Floats, condense, rises

WINDOW = 20


def window(of: Callable[[Floats], Floats]) -> Floats:
    """One series over a window."""
    return of(np.arange(WINDOW, dtype=np.float64))[None, :]


def test_a_line_is_steady_and_its_slope_is_found() -> None:
    """A line rises from its first point on, by its slope."""  # P30
    found = rises(window(lambda x: 100 + 3 * x))
    assert found.slope[0] == pytest.approx(3)
    assert found.steady[0]
    assert found.start[0] == 0


@pytest.mark.parametrize("length", [1, 3, 5, 8])
@pytest.mark.parametrize("start", range(0, WINDOW, 3))
def test_what_fills_up_is_not_steady(start: int, length: int) -> None:
    """A buffer that fills within half of a window, wherever in it, is no leak."""  # P30
    found = rises(window(lambda x: 100 + 900 * np.clip((x - start) / length, 0, 1)))
    assert not found.steady[0]


def test_what_has_ended_or_runs_out_is_not_steady() -> None:
    """Neither a ramp that is over, nor one that runs out, nor a falling one, nor none."""  # P30
    assert not rises(window(lambda x: np.minimum(x, 12))).steady[0]
    assert not rises(window(lambda x: 1 - np.exp(-x / 6))).steady[0]
    assert not rises(window(lambda x: 1 - np.exp(-x / 14))).steady[0]
    assert not rises(window(lambda x: -x)).steady[0]
    assert not rises(window(np.zeros_like)).steady[0]


@given(
    values=st.lists(st.integers(0, 10**9), min_size=WINDOW, max_size=WINDOW),
    factor=st.integers(1, 1000),
    constant=st.integers(0, 10**9),
)
def test_units_and_constants_change_nothing(values: list[int], factor: int, constant: int) -> None:
    """Whether a series is steady depends neither on its unit nor on what is added to it; its slope follows the unit."""
    plain = np.array([values], dtype=np.float64)
    one, other = rises(plain), rises(plain * factor + constant)
    assert other.slope[0] == pytest.approx(one.slope[0] * factor, rel=1e-6, abs=1e-3 * factor)


@given(spoilt=st.sets(st.integers(0, WINDOW - 1), max_size=3), wild=st.floats(-1e12, 1e12))
def test_a_few_wild_points_do_not_move_a_slope(spoilt: set[int], wild: float) -> None:
    """Three points of twenty may be anything: the slope stays near."""
    values = np.arange(WINDOW, dtype=np.float64) * 5
    for place in spoilt:
        values[place] = wild
    assert rises(values[None, :]).slope[0] == pytest.approx(5, rel=0.35)


def test_a_long_window_is_condensed_by_medians() -> None:
    """Neighbours become their median, the oldest that are left over are cut, and a short window stays as it is."""
    values = np.arange(95, dtype=np.float64)[None, :]
    points, size = condense(values)
    assert (points.shape, size) == ((1, 31), 3)
    assert points[0, -1] == 93
    assert condense(values[:, :40])[1] == 1
