"""Memory that fills as a value comes: never more than was allowed, copied while other threads run.

Invariants:

- What would pass the limit is refused before it is stored.
- Memory that was not filled yet is asked for, not used: the system gives pages when they are written.
- Growing doubles, so that a value of unknown length is copied once in sum.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rollout_svc.errors import SampleFailure

__all__ = ["Room"]

Vector = np.ndarray[Any, Any]

_LEAST: Final = 64 * 1024  # bytes to begin with, where nobody knows how many come
_MOST: Final = 256 * 2**20  # bytes asked for because somebody said that they would come


class Room:
    """Bytes that come one after the other.

    Args:
        max_bytes: that may come.
        expected: bytes that are likely to come; 0: nobody knows.
    """

    __slots__ = ("_max_bytes", "_memory", "_size")

    def __init__(self, max_bytes: int, expected: int = 0) -> None:
        self._max_bytes = max_bytes
        self._memory: Vector = np.empty(min(max(expected, _LEAST), _MOST, max_bytes), dtype=np.uint8)
        self._size = 0

    def add(self, data: Vector | bytes) -> None:
        """Append a vector's bytes.

        Raises:
            SampleFailure: `experts_too_large`: they would pass the limit.
        """
        piece = np.frombuffer(data, dtype=np.uint8)
        size = self._size + len(piece)
        if size > self._max_bytes:
            message = f"routed experts of over {self._max_bytes} bytes: experts.max_bytes does not allow more"
            raise SampleFailure("experts_too_large", message)
        if size > len(self._memory):
            self._grow(size)
        np.copyto(self._memory[self._size : size], piece)
        self._size = size

    def _grow(self, size: int) -> None:
        try:
            grown = np.empty(min(max(2 * len(self._memory), size), self._max_bytes), dtype=np.uint8)
        except MemoryError as error:
            raise SampleFailure("experts_too_large", f"no memory for routed experts of {size} bytes") from error
        np.copyto(grown[: self._size], self._memory[: self._size])
        self._memory = grown

    def filled(self, dtype: type[np.generic] = np.uint8) -> Vector:
        """What came, read-only, where it lies."""
        found = self._memory[: self._size].view(dtype)
        found.setflags(write=False)
        return found
