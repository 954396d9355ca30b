"""Prompt sources for tests, found by `module:attr`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["breaks", "nothing", "one_is_wrong", "refused"]


def breaks() -> Iterator[dict[str, Any]]:
    """Give two prompts, and then raise."""
    yield {"id": "p0", "input_ids": [1]}
    raise RuntimeError("the source is broken")


def one_is_wrong() -> Iterator[dict[str, Any]]:
    """Give a line that is none."""
    yield {"id": "p0", "input_ids": [1]}
    yield {"id": "p1", "input_ids": "not a list"}


def nothing() -> Iterator[dict[str, Any]]:
    """Give nothing."""
    yield from ()


def refused() -> Iterator[dict[str, Any]]:
    """Give two prompts that the chat template of `tests/service/test_producing.py` refuses."""
    for number in range(2):
        yield {"id": f"p{number}", "messages": [{"role": "user", "content": "?"}]}
