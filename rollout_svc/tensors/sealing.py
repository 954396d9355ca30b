"""Arrays that their readers cannot write to, nor make writable.

NumPy lets whoever has an array of writable memory set its flag again; one over a read-only buffer it refuses.

Invariants:

- Nothing is copied; what is given out keeps the bytes for as long as it is held.
- The array that is given stays as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["sealed"]


def sealed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of an array of numbers, for good read-only."""
    return np.asarray(array.data.toreadonly())
