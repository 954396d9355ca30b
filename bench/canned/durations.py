"""How long a canned generation takes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SPREADS", "durations"]

SPREADS = ("fixed", "uniform", "lognormal")
SIGMA = 1.2
"""Of the logarithm: half of the draws are below half of the mean, one in a hundred is above eight means."""


def durations(spread: str, mean_s: float, rng: random.Random) -> Callable[[], float]:
    """What draws durations of this mean, in seconds: all the same, uniform from 0 to twice the mean, or lognormal."""
    if spread == "uniform":
        return lambda: rng.uniform(0.0, 2.0 * mean_s)
    if spread == "lognormal":
        mu = math.log(mean_s) - SIGMA**2 / 2
        return lambda: rng.lognormvariate(mu, SIGMA)
    return lambda: mean_s
