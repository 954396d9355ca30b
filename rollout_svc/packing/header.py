"""The header of a safetensors body: which tensors follow, and where each of them lies.

Source of the format: https://huggingface.co/docs/safetensors/index#format.

Invariant: tensors lie in the order they are listed, without gaps; the first is aligned to `ALIGNMENT`, and so is every
other where those of larger items come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

__all__ = ["ALIGNMENT", "DTYPES", "Listed", "write_header"]

ALIGNMENT: Final = 8  # so that a reader may use the data where it lies
DTYPES: Final[dict[str, type[np.generic]]] = {
    "I64": np.int64,
    "F32": np.float32,
    "U16": np.uint16,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
"""By the format's names."""


class Listed(NamedTuple):
    """One tensor: its name, its dtype by the format's name, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def write_header(tensors: Iterable[Listed], metadata: Mapping[str, str]) -> bytes:
    """The header with its own length before it, padded with spaces."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
