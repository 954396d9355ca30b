"""A seed for each mutant whose history finds it: written by `--record`, for any change of the simulator changes them.

Invariant: every mutant has one, and nothing else has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson

__all__ = ["read_seeds", "write_seeds"]

_FILE: Final = Path(__file__).with_name("recorded.json")


def read_seeds() -> dict[str, int]:
    """By mutant."""
    seeds: dict[str, int] = orjson.loads(_FILE.read_bytes())
    return seeds


def write_seeds(seeds: dict[str, int]) -> None:
    """Write them down."""
    _FILE.write_bytes(
        orjson.dumps(seeds, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
    )
