"""Operations instead of seconds: how many lines of Python run, which no other process can change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Counted", "counting", "operations"]


class Counted:
    """The number of lines, those of comprehensions and generators at every turn they take."""

    lines = 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Count the lines that run within, in whatever the loop runs meanwhile as well; frames that run already are not."""
    counted = Counted()

    def trace(_: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            counted.lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


def operations(work: Callable[[], object]) -> int:
    """Count the lines that run in `work`."""
    with counting() as counted:
        work()
    return counted.lines
