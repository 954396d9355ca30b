"""What of an engine's memory can be given up for a while, and the order in which it comes back: pure.

Invariants:

- Weights come back before the cache: new ones are loaded while the cache's memory is still free.
- What an engine does not say of its sleep is never guessed: it is unknown, or not certain.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

__all__ = ["TAGS", "Asleep", "Tag", "in_order"]

Tag = Literal["weights", "kv_cache"]
"""A share of an engine's memory."""

TAGS: Final[tuple[Tag, ...]] = get_args(Tag)
"""In the order of waking."""


class Asleep(NamedTuple):
    """What an engine says of its sleep.

    Attributes:
        tags: what is given up; where it says only that it sleeps, all.
        kept: its weights will be what they were; false where it does not say how it was put to sleep.
    """

    tags: frozenset[Tag]
    kept: bool


def in_order(tags: frozenset[Tag] | set[Tag]) -> list[Tag]:
    """List tags in the order of waking."""
    return [tag for tag in TAGS if tag in tags]
