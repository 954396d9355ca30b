"""Routed experts, to and from the rows that a journal keeps of them; pure.

Invariants:

- What comes back is what went in, byte for byte; its own bytes, and nobody can write to it.
- A row is small: nothing holds the interpreter for longer than it takes to copy `PIECE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["PIECE_BYTES", "Piece", "join", "split"]

PIECE_BYTES: Final = 2**20
"""Of one row: about 0.1 ms to copy."""
_DTYPES: Final = ("uint8", "uint16")
_DIMENSIONS: Final = 3
Experts = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """A row.

    Attributes:
        piece: its place, from 0.
        dtype: of all, NumPy's name; little-endian.
        tokens: rows of all pieces together, like `layers` and `top_k`.
        data: bytes.
    """

    piece: int
    dtype: str
    tokens: int
    layers: int
    top_k: int
    data: memoryview | bytes


def split(experts: Experts) -> Iterator[Piece]:
    """Cut an array into rows, at least one; nothing is copied.

    Args:
        experts: `(tokens, layers, top_k)`, uint8 or uint16.

    Raises:
        ValueError: it is something else.
    """
    if experts.ndim != _DIMENSIONS or experts.dtype.name not in _DTYPES:
        raise ValueError(f"routed experts of shape {experts.shape} and dtype {experts.dtype}")
    tokens, layers, top_k = experts.shape
    flat = np.ascontiguousarray(experts).reshape(-1).view(np.uint8)
    cuts = [*range(0, max(1, flat.size), PIECE_BYTES), flat.size]
    for piece, (start, end) in enumerate(pairwise(cuts)):
        yield Piece(piece, experts.dtype.name, tokens, layers, top_k, flat[start:end].data)


def join(pieces: Sequence[Piece]) -> Experts:
    """Put an array together again, of all its rows in order.

    Raises:
        ValueError: they are not all of one array.
    """
    first = pieces[0]
    if first.dtype not in _DTYPES or {piece[1:5] for piece in pieces} != {first[1:5]}:
        raise ValueError("routed experts of which the pieces do not fit")
    experts = np.empty((first.tokens, first.layers, first.top_k), dtype=first.dtype)
    flat, at = experts.reshape(-1).view(np.uint8), 0
    for place, piece in enumerate(pieces):
        end = at + len(piece.data)
        if piece.piece != place or end > flat.size:
            raise ValueError("routed experts of which a piece is missing")
        flat[at:end] = np.frombuffer(piece.data, dtype=np.uint8)
        at = end
    if at != flat.size:
        raise ValueError(f"routed experts of {at} bytes, where {flat.size} should be")
    experts.setflags(write=False)
    return experts
