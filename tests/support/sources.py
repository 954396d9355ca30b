"""Prompt sources for tests, found by `module:attr`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["breaks", "one_is_wrong"]


def breaks() -> Iterator[dict[str, Any]]:
    """Give two prompts, and then raise."""
    yield {"id": "p0", "input_ids": [1]}
    raise RuntimeError("the source is broken")


def one_is_wrong() -> Iterator[dict[str, Any]]:
    """Give a line that is none."""
    yield {"id": "p0", "input_ids": [1]}
    yield {"id": "p1", "input_ids": "not a list"}
