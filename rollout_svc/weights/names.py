"""Which tensors weights have to have, by what is known of other weights of the same model.

Engines take less than a whole model without a word: vLLM answers 200, sets the label, and computes with the old
weights where none came.

Invariants:

- Pure: what is not known is no difference, and a dtype never is: engines cast.
- A difference is told with its tensor's name, those that are missing first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

__all__ = ["Kind", "differences", "listed"]

_SHOWN: Final = 5  # names in one line; the rest are counted


class Kind(NamedTuple):
    """What is known of a tensor beside its name."""

    shape: tuple[int, ...]
    dtype: str


def differences(
    found: Mapping[str, Kind], known: Mapping[str, Kind], *, ignored: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Compare weights with others of the same model.

    Args:
        found: the weights.
        known: the others.
        ignored: names of which neither side has to have any.

    Returns:
        what is missing, unknown or of another shape, a line each; and the names of what is of another dtype.
    """
    left_out = frozenset(ignored)
    lines = [f"missing {name}" for name in known if name not in found and name not in left_out]
    lines += [f"unknown {name}" for name in found if name not in known and name not in left_out]
    both = [(name, kind, known[name]) for name, kind in found.items() if name in known]
    lines += [
        f"{name}: {list(kind.shape)} in place of {list(other.shape)}"
        for name, kind, other in both
        if kind.shape != other.shape
    ]
    return lines, [name for name, kind, other in both if kind.dtype != other.dtype]


def listed(names: Iterable[str]) -> str:
    """Name a few, and count the others."""
    told = list(names)
    shown = ", ".join(told[:_SHOWN])
    return shown if len(told) <= _SHOWN else f"{shown} and {len(told) - _SHOWN} more"
