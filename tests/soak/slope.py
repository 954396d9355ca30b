"""Whether a series grows: a robust slope, and how much of it is explained by noise.

Invariants:
- Pure. A few outliers, however large, move the verdict no more than their number allows.
- A plateau that was reached before the window, and a saw-tooth shorter than it, are no growth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

SPREAD: Final = 2 * 2**20
"""Bytes that a process may grow by over the window, however long: the allocator still spreads out, ever more slowly.
Over 500 steps that is a page a step; a sample left behind, with its tokens and its task, is several."""
WARM_STEPS: Final = 250
"""A shorter window is still of a process that warms up: it may grow by twice as much."""
SIGMAS: Final = 3.0
"""Noise, in standard deviations, by which the end of the window may lie above its beginning."""
_MAD_TO_SIGMA: Final = 1.4826  # of a normal distribution


class Slope(NamedTuple):
    """Growth of a series over its second half.

    Attributes:
        value: per step, the median of the slopes between all pairs (Theil, 1950; Sen, 1968).
        sigma: standard deviation of what is left around the line, from the median deviation.
        bound: the most that `value` may be, per step.
        steps: in the window.
    """

    value: float
    sigma: float
    bound: float
    steps: int

    @property
    def flat(self) -> bool:
        """Whether the growth is no more than noise."""
        return self.value <= self.bound


def slope_of(series: Sequence[float], spread: float = SPREAD) -> Slope:
    """Measure the second half of a series, at least four values long; `spread` is what it may grow by without noise."""
    window = np.asarray(series[len(series) // 2 :], dtype=np.float64)
    count = len(window)
    first, second = np.triu_indices(count, k=1)
    value = float(np.median((window[second] - window[first]) / (second - first)))
    left = window - value * np.arange(count)
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(left - np.median(left))))
    allowed = spread if count >= WARM_STEPS else 2 * spread
    return Slope(value, sigma, (allowed + SIGMAS * sigma) / count, count)
