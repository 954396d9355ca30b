"""The verdict on a series: leaks are found, noise is not taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak.slope import slope_of

BASE = 100e6
PAGE = 4096


def noise(seed: int, count: int, sigma: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(BASE, sigma, count)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([100, 1000]), st.floats(0, 2e6))
def test_noise_is_flat(seed: int, count: int, sigma: float) -> None:
    """However large, in any of many histories; so is a plateau that was reached in the first half."""
    series = noise(seed, count, sigma)
    assert slope_of(list(series)).flat
    series[: count // 3] -= np.linspace(50e6, 0, count // 3)
    assert slope_of(list(series)).flat


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1e6))
def test_a_leak_of_some_pages_a_step_is_found(seed: int, sigma: float) -> None:
    """In 1,000 steps of a noise of up to a megabyte: four pages a step are eight megabytes over the window."""
    leak = 4 * PAGE * np.arange(1000)
    found = slope_of(list(noise(seed, 1000, sigma) + leak))
    assert not found.flat
    assert found.value == pytest.approx(4 * PAGE, rel=0.2)


def test_outliers_and_saw_teeth_are_not_growth() -> None:
    """A collection every 90 steps, and a few steps at which a whole batch was in memory."""
    series = BASE + 5e4 * (np.arange(1000) % 90)
    series[::100] += 300e6
    assert slope_of(list(series)).flat
