"""What the service and a judge process write to each other: calls one way, answers the other, in frames.

Invariants:

- A frame is a header of fixed size, which says how long it is, and its body: what was read so far splits one way only.
- A length beyond the bound is no frame: whoever wrote it is not one of ours any more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = [
    "ANSWER_BYTES",
    "FAILED",
    "READY",
    "RESULT",
    "SKIPPED",
    "SPENT",
    "Answer",
    "Broken",
    "answer",
    "answers",
    "call",
    "calls",
    "skip",
]

RESULT: Final = 0  # the body is the pickled result
FAILED: Final = 1  # the body is the pickled `(text, where)`
SKIPPED: Final = 2  # it was taken back before it began
READY: Final = 3  # the process can take calls
SPENT: Final = 4  # it ends, and has begun none of the calls that it has not answered

ANSWER_BYTES: Final = 4 << 20
"""Bytes of the largest answer: it is read in the loop."""
_CALL: Final = struct.Struct("<BQII")  # run or skip, number, length of the judger's description, length of the payload
_ANSWER: Final = struct.Struct("<IQdB")  # length of the body, number, seconds it ran, kind
_RUN: Final = 1
_SKIP: Final = 0


class Broken(Exception):
    """Raised when what was read is no frame."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a judge process says."""

    number: int
    run_s: float
    kind: int
    body: bytes


def call(number: int, spec: bytes, payload: bytes) -> bytes:
    """Return the frame that asks for a call."""
    return _CALL.pack(_RUN, number, len(spec), len(payload)) + spec + payload


def skip(number: int) -> bytes:
    """Return the frame that takes a call back, if it has not begun."""
    return _CALL.pack(_SKIP, number, 0, 0)


def calls(read: bytearray) -> Iterator[tuple[int, bytes, bytes] | int]:
    """Take the whole frames out of what was read: calls, and numbers that are taken back."""
    at = 0
    while len(read) - at >= _CALL.size:
        what, number, spec, payload = _CALL.unpack_from(read, at)
        end = at + _CALL.size + spec + payload
        if len(read) < end:
            break
        middle = at + _CALL.size + spec
        yield (number, bytes(read[at + _CALL.size : middle]), bytes(read[middle:end])) if what == _RUN else number
        at = end
    del read[:at]


def answer(number: int, run_s: float, kind: int, body: bytes = b"") -> bytes:
    """Return the frame of an answer."""
    return _ANSWER.pack(len(body), number, run_s, kind) + body


def answers(read: bytearray) -> list[Answer]:
    """Take the whole frames out of what was read.

    Raises:
        Broken: it is no frame.
    """
    found, at = [], 0
    while len(read) - at >= _ANSWER.size:
        length, number, run_s, kind = _ANSWER.unpack_from(read, at)
        if length > ANSWER_BYTES or kind > SPENT:
            raise Broken("its process wrote what is no answer")
        end = at + _ANSWER.size + length
        if len(read) < end:
            break
        found.append(Answer(number, run_s, kind, bytes(read[at + _ANSWER.size : end])))
        at = end
    del read[:at]
    return found
