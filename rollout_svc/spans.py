"""Places of named things in one buffer: whether each has its own.

Invariants:

- Pure. Things of no length are nowhere, and in nobody's way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

__all__ = ["clash_of"]


def clash_of(spans: Iterable[tuple[str, int, int]]) -> str | None:
    """Say what is wrong with a list of places, each a name and `[start, end)`; None: nothing.

    A name that is there twice, or two that share a part of the buffer: whoever reads them would take one for the other.
    """
    given = list(spans)
    seen: set[str] = set()
    for name, _, _ in given:
        if name in seen:
            return f"expected each name once, not {name!r:.100} twice"
        seen.add(name)
    taken = sorted((start, end, name) for name, start, end in given if end > start)
    for (_, end, name), (start, _, other) in pairwise(taken):
        if start < end:
            return f"expected places of their own: {name!r:.100} ends at {end}, {other!r:.100} begins at {start}"
    return None
