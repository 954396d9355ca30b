"""Routed experts of samples, to be sent where they lie.

| name | dtype | shape | |
|---|---|---|---|
| `routed_experts` | uint8, or uint16 where one of them is | (R, layers, k) | rows of all samples, one after the other |
| `routed_experts_offsets` | int64 | (N + 1,) | where each sample's rows begin, and the last one's end |

Invariants:

- Nothing is put together: each sample's array is sent from where it is, except where its dtype has to be widened.
- What is sent is held until it is sent: its owner may release it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rollout_svc.errors import Conflict
from rollout_svc.heavy import Heavy
from rollout_svc.packing.header import Listed, write_header
from rollout_svc.tensors import ReadHandle

__all__ = ["EXPERTS", "OFFSETS", "Routing", "gather", "pack_experts"]

EXPERTS: Final = "routed_experts"
OFFSETS: Final = "routed_experts_offsets"
_DTYPES: Final = {"uint8": "U8", "uint16": "U16"}
_Array = np.ndarray[Any, Any]


class Routing(NamedTuple):
    """Routed experts of the samples of a batch.

    Attributes:
        arrays: of those that have some, in order, all of one dtype.
        offsets: int64 (N + 1,).
        listed: the tensor they make, one after the other.
    """

    arrays: Sequence[_Array]
    offsets: _Array
    listed: Listed

    def pieces(self) -> list[memoryview]:
        """The bytes, one piece per sample."""
        return [_bytes_of(array) for array in self.arrays if array.size]


def gather(owned: Sequence[Heavy | None]) -> Routing | None:
    """Read the routed experts of samples; None where none has any. Blocks: call it in a thread.

    Raises:
        Conflict: `experts_differ`: they are of models of different layers or top_k, and make no one tensor.
        SpentHandle: a sample was given back meanwhile, or consumed.
    """
    read: list[_Array | None] = [None if heavy is None else heavy.read() for heavy in owned]
    arrays = [array for array in read if array is not None]
    if not arrays:
        return None
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        told = ", ".join(str(shape) for shape in sorted(shapes))
        raise Conflict(f"routed experts of one batch are of several (layers, top_k): {told}", type="experts_differ")
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    offsets = np.zeros(len(read) + 1, dtype=np.int64)
    np.cumsum([0 if array is None else len(array) for array in read], out=offsets[1:])
    listed = Listed(EXPERTS, _DTYPES[dtype.name], (int(offsets[-1]), *shapes.pop()))
    return Routing([array.astype(dtype, copy=False) for array in arrays], offsets, listed)


def pack_experts(lent: ReadHandle) -> list[memoryview]:
    """Make a body of one sample's routed experts alone, in pieces. Blocks: call it in a thread.

    Raises:
        SpentHandle: it is not to be read any more.
    """
    array: _Array = lent.read()
    header = write_header([Listed(EXPERTS, _DTYPES[array.dtype.name], array.shape)], {})
    return [memoryview(header), *([_bytes_of(array)] if array.size else [])]


def _bytes_of(array: _Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
