"""What is known of one process's accounts: their last window, the levels before it, and how each was reached.

Pure: the values of a step are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rollout_svc.observe.memory.growth import Growth
from rollout_svc.observe.memory.shape import Booleans, Floats, Places

__all__ = ["Said", "Series"]

_HIGHS: Final = 5  # windows before the present one in which it may not have been as high, but for one leap
_SMOOTH: Final = 5  # values whose median stands for a level, at most; a quarter of a window


@dataclass(slots=True)
class Said:
    """A leak that was said: as it was at first, as it is now, and its growth when it was last said."""

    first: Growth
    last: Growth
    base: float
    told: float


@dataclass(slots=True)
class Series:
    """What is known of one process.

    Attributes:
        names: row of each account in the arrays.
        now, first: latest values, also between steps; those of the first step.
        values: the last window, the latest at the right; shape (accounts, window).
        climbed: what was reached by growth that looked like a leak, in the last window and those of `highs`.
        highs: levels of the windows before; shape (accounts, `_HIGHS` windows).
        slopes: bytes a step.
        agreed: for how many steps in a row each account has looked like a leak.
    """

    window: int
    names: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    steps: deque[int] = field(default_factory=deque)
    seen: int = 0
    values: Floats = field(init=False)
    climbed: Booleans = field(init=False)
    highs: Floats = field(init=False)
    slopes: Floats = field(init=False)
    agreed: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    said: dict[str, Said] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = np.zeros((0, self.window))
        self.climbed = np.zeros((0, self.window * (_HIGHS + 1)), dtype=np.bool_)
        self.highs = np.full((0, self.window * _HIGHS), -np.inf)
        self.slopes = np.zeros(0)
        self.agreed = np.zeros(0, dtype=np.int64)

    @property
    def smooth(self) -> int:
        """How many values have a median that stands for a level."""
        return min(_SMOOTH, self.window // 4)

    @property
    def full(self) -> bool:
        """Whether a whole window was seen."""
        return self.seen >= self.window

    def push(self, step: int, accounts: Mapping[str, int]) -> None:
        """Add the values of a step; an account that is new had nothing before, one that is missing has nothing now."""
        new = [name for name in accounts if name not in self.names]
        if new:
            self.names |= {name: len(self.names) + place for place, name in enumerate(new)}
            self.values = np.vstack([self.values, np.zeros((len(new), self.window))])
            self.climbed = np.vstack([self.climbed, np.zeros((len(new), self.climbed.shape[1]), dtype=np.bool_)])
            self.highs = np.vstack([self.highs, np.full((len(new), self.highs.shape[1]), -np.inf)])
            self.slopes = np.concatenate([self.slopes, np.zeros(len(new))])
            self.agreed = np.concatenate([self.agreed, np.zeros(len(new), dtype=np.int64)])
        if self.full:
            self.highs[:, :-1] = self.highs[:, 1:]
            self.highs[:, -1] = np.median(self.values[:, : self.smooth], axis=1)
            self.climbed[:, :-1] = self.climbed[:, 1:]
            self.climbed[:, -1] = False
        self.values[:, :-1] = self.values[:, 1:]
        self.values[:, -1] = [accounts.get(name, 0) for name in self.names]
        self.steps.append(step)
        if len(self.steps) > self.window:
            self.steps.popleft()
        if not self.seen:
            self.first = dict(accounts)
        self.seen += 1

    def climbs(self, steady: Booleans, start: Places) -> None:
        """Note what of the window was reached by growth: from where it began, of the accounts that rise like a leak."""
        self.climbed[:, -self.window :] |= steady[:, None] & (np.arange(self.window) >= start[:, None])

    def been_at(self, now: Floats, base: Floats, enough: float) -> Booleans:
        """Whether each account was at a level in the windows before: by growth, or as it moves up and down by itself.

        A single time above the base is not counted where it went up and down by leaps, hardly ever between, and twice
        as high as the growth in question: a start, a checkpoint. What is passed soon may be waited for.

        Args:
            now: levels.
            base: levels that the growth began at.
            enough: fraction that tells two levels apart.
        """
        there = self.highs * (1 + enough) > now[:, None]
        above = there | (self.highs > base[:, None] * (1 + enough / 2))
        times = above[:, 0] + np.sum(above[:, 1:] & ~above[:, :-1], axis=1)
        lag = self.smooth // 2  # each high is the median of as many values on both sides of it
        grown = there & self.climbed[:, lag : lag + there.shape[1]]
        between = (above & ~there).sum(axis=1) > self.smooth
        low = self.highs.max(axis=1) < now + (now - base)
        been: Booleans = there.any(axis=1) & ((times > 1) | between | low | grown.any(axis=1))
        return been

    def level(self, row: int) -> float:
        """What an account has now, but for a single wild value."""
        return float(np.median(self.values[row, -self.smooth :]))
