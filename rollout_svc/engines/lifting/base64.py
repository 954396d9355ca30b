"""Base64, decoded as it comes, into memory that fills; other threads run meanwhile.

Invariants:

- Pure: any cut gives what decoding the whole would, or SampleFailure; nothing but the standard alphabet gets through.
- Memory is that of the result and of one piece.
"""

from __future__ import annotations

import binascii
from typing import Final

import pybase64

from rollout_svc.engines.lifting.room import Room
from rollout_svc.errors import SampleFailure

__all__ = ["Base64"]

_GROUP: Final = 4  # characters that are three bytes


class Base64:
    """Decodes one value.

    Args:
        max_bytes: of what it becomes.
        expected: bytes it is likely to become, or 0.
    """

    __slots__ = ("_carry", "_padded", "_room")

    def __init__(self, max_bytes: int, expected: int = 0) -> None:
        self._room = Room(max_bytes, expected)
        self._carry = b""
        self._padded = False

    def feed(self, data: bytes) -> None:
        """Take the next characters.

        Raises:
            SampleFailure: `experts_invalid`: no base64; `experts_too_large`.
        """
        start = 0
        if self._carry:
            start = _GROUP - len(self._carry)
            group = self._carry + data[:start]
            if len(group) < _GROUP:
                self._carry = group
                return
            self._decode(group)
        end = len(data) - (len(data) - start) % _GROUP
        if end > start:
            self._decode(memoryview(data)[start:end])
        self._carry = data[end:]

    def finish(self) -> memoryview:
        """Return the bytes, read-only, where they lie.

        Raises:
            SampleFailure: `experts_invalid`: it ends in the middle.
        """
        if self._carry:
            raise _invalid("it ends in the middle of a group")
        return self._room.filled().data

    def _decode(self, text: bytes | memoryview) -> None:
        if self._padded:
            raise _invalid("something stands after its padding")
        self._padded = text[-1] == ord("=")
        try:
            self._room.add(pybase64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise _invalid(str(error)) from error


def _invalid(what: str) -> SampleFailure:
    return SampleFailure("experts_invalid", f"routed experts in base64: {what}")
