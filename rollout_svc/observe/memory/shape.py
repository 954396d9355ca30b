"""The shape of growth: whether the last values of many series rise as a leak does, and how steeply.

A leak goes on; a buffer that fills, a checkpoint's saw-tooth and noise do not. So three questions are asked of a
window, and all must be answered with yes:

- How steep is it? Theil and Sen: the median of the slopes between any two points. A few wild points change nothing.
- Does it rise throughout? Kendall: of all pairs of points, the later one is higher in most. One jump is not enough.
- Does it still, and has it for long? The ramp that fits best (flat, then a line, then flat) has to be long, and to
  reach the end of the window. A buffer that fills in half of a window is short, one that was filled before, or fills
  ever more slowly, is over.

Invariants:

- Pure: values in, answers out; every series of a call is looked at in one go, so that a step costs microseconds each.
- Nothing depends on the unit of the values, nor on a constant added to them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["POINTS", "Rise", "condense", "rises"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]
Places = np.ndarray[Any, np.dtype[np.intp]]

POINTS: Final = 40
"""Points of a window that are looked at: a longer one is condensed to so many, or fewer, by medians."""
_RISING_PAIRS: Final = 0.7  # of pairs that rise, less those that fall: a single jump has at most 0.53
_LONG: Final = 0.6  # of the window, that the best ramp lasts
_OVER: Final = 0.2  # of the window, since the best ramp was over: then it is no longer growing


class Rise(NamedTuple):
    """What was found of each series.

    Attributes:
        slope: value per point, by Theil and Sen; shape (series,).
        steady: whether it rises throughout, for long, and still does; shape (series,).
        start: the point at which the best ramp begins; shape (series,).
    """

    slope: Floats
    steady: Booleans
    start: np.ndarray[Any, np.dtype[np.intp]]


class _Tables(NamedTuple):
    """What depends on the number of points alone.

    Attributes:
        first, second: the pairs.
        ramps: one ramp a row, its mean taken off, of length 1; shape (ramps, points).
        starts: the point each ramp begins at; shape (ramps,).
        likely: whether a ramp is long and lasts to the end; shape (ramps,).
    """

    first: np.ndarray[Any, np.dtype[np.intp]]
    second: np.ndarray[Any, np.dtype[np.intp]]
    ramps: Floats
    starts: np.ndarray[Any, np.dtype[np.intp]]
    likely: Booleans


def condense(values: Floats, points: int = POINTS) -> tuple[Floats, int]:
    """Shorten series to at most `points` points, each the median of as many neighbours; the oldest left over are cut.

    Args:
        values: shape (series, length).
        points: most points of the answer.

    Returns:
        Shape (series, at most `points`), and how many values one point stands for.
    """
    size = -(-values.shape[1] // points)
    if size == 1:
        return values, 1
    whole = values[:, values.shape[1] % size :]
    return np.median(whole.reshape(len(values), -1, size), axis=2), size


def rises(values: Floats) -> Rise:
    """Ask the three questions of each series.

    Args:
        values: shape (series, points), at least 4 points at equal distances, the last one the latest.
    """
    count = values.shape[1]
    tables = _tables(count)
    rise = values[:, tables.second] - values[:, tables.first]
    slope = np.median(rise / (tables.second - tables.first), axis=1)
    throughout = np.sign(rise).mean(axis=1) >= _RISING_PAIRS
    best = np.argmax(_calmed(values) @ tables.ramps.T, axis=1)
    return Rise(slope, throughout & tables.likely[best], tables.starts[best])


def _calmed(values: Floats) -> Floats:
    """Each point as the median of itself and its neighbours, so that a single wild one is nothing."""
    padded = np.concatenate([values[:, :1], values, values[:, -1:]], axis=1)
    return np.asarray(np.median(np.stack([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]]), axis=0), dtype=np.float64)


@lru_cache(maxsize=8)
def _tables(count: int) -> _Tables:
    first, second = np.triu_indices(count, 1)
    ramps = np.clip(np.arange(count, dtype=np.float64), first[:, None], second[:, None])
    ramps -= ramps.mean(axis=1, keepdims=True)
    ramps /= np.linalg.norm(ramps, axis=1, keepdims=True)
    last = count - 1
    likely = (second - first >= _LONG * last) & (last - second <= _OVER * last)
    return _Tables(first, second, ramps, first, likely)
