"""Nested lists of integers, read from the bytes of their JSON as they come: three dimensions, no Python object each.

A list of 64 MiB is 20 million integers: a JSON parser makes an object of each and holds the interpreter for seconds.
Here a piece is looked at as one vector: where digits are, where a run of them ends, what it comes to. NumPy lets other
threads run meanwhile, so that a loop beside it is never held for longer than one small step takes.

Invariants:

- Pure: pieces in, in any cut; out comes what parsing the whole would give, or SampleFailure.
- Every row is like the first: what lies between the numbers has to be the first row's brackets and commas again, byte
  for byte, blanks aside. So nothing but whole, regular lists of integers from 0 to 65,535 gets through.
- Memory is that of the result and of one piece.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rollout_svc.engines.lifting.room import Room
from rollout_svc.errors import SampleFailure

__all__ = ["Numbers"]

Vector = np.ndarray[Any, Any]

_SLICE: Final = 128 * 1024  # bytes looked at in one step: its vectors stay in a core's cache
_ROW: Final = 1024 * 1024  # bytes of brackets, commas and one digit a number: the longest row that is believed
_DIGITS: Final = 5  # of the largest number, 65,535
_LARGEST: Final = np.iinfo(np.uint16).max
_DIGIT_BYTES: Final = b"0123456789"
_ZERO, _CLOSING, _BLANK = b"0] "
_EMPTY: Final = b"[]"


class Numbers:
    """Reads one value.

    Args:
        max_bytes: of the array it becomes.
        expected: bytes the array is likely to have, or 0.
    """

    def __init__(self, max_bytes: int, expected: int = 0) -> None:
        self._room = Room(max_bytes, expected)
        self._carry = b""
        self._head = b""  # what lies between the numbers, until the first row is known
        self._pattern: Vector | None = None  # a row's skeleton and the comma after it, tiled
        self._period = 0
        self._phase = 0
        self._closed = False
        self._layers = 0
        self._top_k = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the value.

        Raises:
            SampleFailure: `experts_invalid`: no regular nested list of integers; `experts_too_large`.
        """
        for start in range(0, len(data), _SLICE):
            piece = self._carry + data[start : start + _SLICE]
            whole = piece.rstrip(_DIGIT_BYTES)  # a number may go on in the next piece
            self._carry = piece[len(whole) :]
            if len(self._carry) > _DIGITS:
                raise _invalid(f"a number of {len(self._carry)} digits or more")
            if whole:
                self._read(np.frombuffer(whole, dtype=np.uint8))

    def finish(self) -> Vector:
        """Return `(rows, layers, top_k)`, uint16; read-only.

        Raises:
            SampleFailure: as `feed`.
        """
        if self._pattern is None and not self._carry and self._head == _EMPTY:
            return np.empty((0, 0, 0), dtype=np.uint16)
        if self._pattern is None or self._carry or not self._closed:
            raise _invalid("they end in the middle")
        return self._room.filled(np.uint16).reshape(-1, self._layers, self._top_k)

    def _read(self, text: Vector) -> None:
        digits = text - np.uint8(_ZERO)  # wraps around: what is no digit comes to ten or more
        is_digit = digits < 10  # noqa: PLR2004 - a digit
        digits *= is_digit.view(np.uint8)
        is_end = is_digit.copy()
        is_end[:-1] &= ~is_digit[1:]  # the last byte is no digit
        kept = is_end | ~is_digit
        kept &= text > _BLANK  # JSON's blanks, and nothing else that could stand there
        # By places and not by a mask: NumPy takes a third of the time.
        self._compare((text - digits).take(np.flatnonzero(kept)))
        self._room.add(_values(digits, is_digit, is_end))

    def _compare(self, skeleton: Vector) -> None:
        """Check what lies between the numbers, each of which is a 0 here."""
        if self._pattern is None:
            self._head += skeleton.tobytes()
            end = self._head.find(b"]]")
            if end < 0:
                if len(self._head) > _ROW:
                    raise _invalid(f"no row ends within {_ROW} brackets, commas and numbers")
                return
            self._learn(self._head[1 : end + 2])
            skeleton = np.frombuffer(self._head, dtype=np.uint8)[1:]
            self._head = self._head[:1]
        pattern = self._pattern
        if pattern is None or self._closed:
            if len(skeleton):
                raise _invalid("something stands after their end")
            return
        for start in range(0, len(skeleton), _SLICE):
            self._follow(skeleton[start : start + _SLICE], pattern)

    def _follow(self, part: Vector, pattern: Vector) -> None:
        start, expected = self._phase, pattern[self._phase : self._phase + len(part)]
        self._phase = (start + len(part)) % self._period
        if np.array_equal(part, expected):
            return
        # The one difference there may be: the last row is followed by a bracket instead of the comma between rows.
        if self._phase or part[-1] != _CLOSING or not np.array_equal(part[:-1], expected[:-1]):
            raise _invalid("the rows are not alike, or hold something else than integers")
        self._closed = True

    def _learn(self, row: bytes) -> None:
        """Take the skeleton of the first row for that of all."""
        top_k = row.find(b"]") // 2
        layers = row.count(b"[") - 1
        layer = b"[" + b",".join([b"0"] * top_k) + b"]"
        if top_k < 1 or layers < 1 or self._head[:1] != b"[" or row != b"[" + b",".join([layer] * layers) + b"]":
            raise _invalid("the first row is no list of lists of integers")
        self._layers, self._top_k = layers, top_k
        period = row + b","
        self._period = len(period)
        self._pattern = np.frombuffer(period * (_SLICE // len(period) + 2), dtype=np.uint8)


def _values(digits: Vector, is_digit: Vector, is_end: Vector) -> Vector:
    """What each run of digits comes to: every place adds ten times what stood before it, where that was a digit."""
    own = value = digits.astype(np.uint16)
    mask = is_digit.astype(np.uint16)
    run = is_digit
    for place in range(2, _DIGITS + 2):
        run = run[1:] & is_digit[: len(run) - 1]
        if not run.any():
            break
        if place > _DIGITS:
            raise _invalid(f"a number of over {_DIGITS} digits")
        if place == _DIGITS:
            own, mask, value = own.astype(np.uint32), mask.astype(np.uint32), value.astype(np.uint32)
        before = value[:-1] * value.dtype.type(10)
        before *= mask[1:]
        value = own.copy()
        value[1:] += before
    found = value.take(np.flatnonzero(is_end))
    if len(found) and int(found.max()) > _LARGEST:
        raise _invalid(f"a number over {_LARGEST}")
    return found.astype(np.uint16)


def _invalid(what: str) -> SampleFailure:
    return SampleFailure("experts_invalid", f"routed experts as nested lists: {what}")
