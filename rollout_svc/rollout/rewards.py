"""Rewards added up: how many, their mean, how far they are spread. Pure, and of one size whatever is added.

Invariant: adding two sums is the same as adding up both lots, up to rounding (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["RewardSum"]


@dataclass(frozen=True, slots=True)
class RewardSum:
    """So many rewards.

    Attributes:
        count: how many.
        mean: their mean; 0.0 without any.
        spread: sum of the squared distances from the mean.
    """

    count: int = 0
    mean: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Self:
        """Add up some rewards."""
        if not rewards:
            return cls()
        return cls(len(rewards), statistics.fmean(rewards), statistics.pvariance(rewards) * len(rewards))

    @property
    def std(self) -> float:
        """Standard deviation of all of them as they are (population); 0.0 without any."""
        return math.sqrt(self.spread / self.count) if self.count else 0.0

    def __add__(self, other: RewardSum) -> RewardSum:
        if not other.count:
            return self
        if not self.count:
            return other
        count, apart = self.count + other.count, other.mean - self.mean
        return RewardSum(
            count,
            self.mean + apart * other.count / count,
            self.spread + other.spread + apart * apart * self.count * other.count / count,
        )
