"""Prompt sources for tests, found by `module:attr`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

__all__ = [
    "BAD_LINES",
    "Counting",
    "breaks",
    "counted",
    "never",
    "nothing",
    "refused",
    "some_are_wrong",
    "two_and_then_nothing",
]

BAD_LINES: Final[list[Any]] = [
    "no object",
    {"input_ids": "not a list"},
    {"input_ids": [1], "typo": 1, 2: 3},
    {"input_ids": [1], "half \ud83d": 1},
    {"text": "half a character: \ud83d"},
    {"input_ids": [1], "id": "\ud83d"},
    {"input_ids": [1], "ground_truth": object()},
    {"input_ids": [1], "meta": {1: 2}},
    {"input_ids": [2**70]},
    {"messages": [{"role": "user", "content": "hello"}]},
]
"""One line each of what cannot be used; the last needs a tokenizer."""


def breaks() -> Iterator[dict[str, Any]]:
    """Give a prompt, and then raise."""
    yield {"id": "p0", "input_ids": [1]}
    raise RuntimeError("the source is broken")


def some_are_wrong() -> Iterator[Any]:
    """Give a good line before, between and after bad ones, and end."""
    for number, bad in enumerate(BAD_LINES):
        yield {"id": f"p{number}", "input_ids": [number + 1], "ground_truth": number}
        yield bad


def two_and_then_nothing() -> Iterator[dict[str, Any]]:
    """Give two prompts, and then hang for good."""
    yield {"id": "p0", "input_ids": [1], "ground_truth": 0}
    yield {"id": "p1", "input_ids": [2], "ground_truth": 1}
    threading.Event().wait()


def never() -> Iterator[dict[str, Any]]:
    """Hang for good at the first prompt."""
    threading.Event().wait()
    yield {}


def nothing() -> Iterator[dict[str, Any]]:
    """Give nothing."""
    yield from ()


def refused() -> Iterator[dict[str, Any]]:
    """Give two prompts that the chat template of `tests/service/test_producing.py` refuses."""
    for number in range(2):
        yield {"id": f"p{number}", "messages": [{"role": "user", "content": "?"}]}


def counted() -> Iterator[dict[str, Any]]:
    """Give 24 prompts, `p0`, `p1`, …, without a state."""
    return ({"id": f"p{number}", "input_ids": [1, number], "ground_truth": number} for number in range(24))


class Counting:
    """The same, with a state."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Give what is left."""
        for line in list(counted())[self.given :]:
            self.given += 1
            yield line

    def state(self) -> dict[str, int]:
        """How many were given."""
        return {"given": self.given}

    def restore(self, state: dict[str, int]) -> None:
        """Go on after so many."""
        self.given = state["given"]
