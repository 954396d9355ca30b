"""How a number is dealt out. Pure.

Invariants:

- Nobody is given more than there is of it, and all that can be given is.
- What everybody gets is in proportion to what it has, up to one.
- A prompt's home depends on its task, its id and the number of shards, and on nothing else: not on who is alive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeVar

__all__ = ["home_of", "share_out"]

K = TypeVar("K")


def share_out(number: int, has: Mapping[K, int]) -> dict[K, int]:
    """Give out `number` in proportion to what each has, by largest remainder; at most what there is.

    Args:
        number: how many are wanted.
        has: how many each has; among equals the first in order comes first.
    """
    total = sum(has.values())
    if number >= total:
        return dict(has)
    exact = {key: Fraction(number * count, total) for key, count in has.items()}
    given = {key: int(share) for key, share in exact.items()}
    left = number - sum(given.values())
    for key in sorted(has, key=lambda key: given[key] - exact[key])[:left]:
        given[key] += 1
    return given


def home_of(task: str, prompt_id: str, shards: int) -> int:
    """Which of so many shards a prompt belongs to."""
    digest = hashlib.blake2b(f"{task}\0{prompt_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards
