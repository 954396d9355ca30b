"""Real numbers, whoever's they are: Python's, numpy's and torch's scalars, tensors of no dimension.

Invariants:

- What is taken is one finite real number; a truth value is 1 or 0, as Python has it. NaN, infinity, complex numbers,
  texts and whatever has a length are none.
- Neither numpy nor torch is imported for it: their scalars say themselves that they have no dimension.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["as_real", "unwrapped"]


def as_real(value: Any) -> float | None:
    """The finite real number that a value is; None where it is none.

    Raises:
        Exception: whatever an object of somebody's making raises when it is looked at.
    """
    number = unwrapped(value)
    if not isinstance(number, numbers.Real):
        return None
    try:
        real = float(number)
    except OverflowError:  # no float can hold it
        return None
    return real if math.isfinite(real) else None


def unwrapped(value: Any) -> Any:
    """What a scalar of numpy's or torch's holds, as Python has it; anything else as it is."""
    if isinstance(value, int | float) and type(value).__module__ == "builtins":
        return value
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not shape and callable(item := getattr(value, "item", None)):
        return item()
    return value
