"""Tensors as bytes and back, of torch or of NumPy; nothing is converted on the way.

Invariants:

- Bytes are the tensor's own, in row-major order, little-endian. NumPy has no bfloat16 and no float8: the name of the
  dtype travels beside the bytes, and the bytes are never read as anything else.
- What is lent cannot change what it was lent from. A NumPy array cannot be written to, nor made writable. torch has no
  read-only tensors: what it lends shares its memory until somebody writes to it (copy-on-write), and then gets memory
  of its own.
- torch is imported only for a tensor of torch.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Final

import numpy as np

from rollout_svc.dense import lack_of
from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.sealing import sealed
from rollout_svc.tensors.shards.names import Meta
from rollout_svc.tensors.shards.pages import hinted, slack

__all__ = ["Blank", "describe", "is_tensor", "itemsize", "lend", "payload"]

_NUMPY_KINDS: Final = "biufc"  # numbers and truth values; never objects
_WORDS: Final = "OSUT"  # objects and strings: no tensors, whatever holds them
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def is_tensor(value: Any) -> bool:
    """Say whether a value is a tensor of torch or of NumPy; an array of objects or strings is none."""
    return (isinstance(value, np.ndarray) and value.dtype.kind not in _WORDS) or _is_torch(value)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has one has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def describe(tensor: Any) -> Meta:
    """Say what a tensor looks like.

    Raises:
        ShardFailure: `invalid`: it is not made of plain numbers in a row (objects, masked, sparse, quantised), or they
            are not here (sharded, on no device, given back).
    """
    if isinstance(tensor, np.ndarray):
        if isinstance(tensor, np.ma.MaskedArray):
            raise ShardFailure("invalid", "of a masked array the mask would be lost")
        if tensor.dtype.kind not in _NUMPY_KINDS:
            raise ShardFailure("invalid", f"an array of dtype {tensor.dtype} has no bytes that could be sent")
        return Meta(tuple(tensor.shape), tensor.dtype.newbyteorder("=").name, "numpy")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (lack := lack_of(tensor)) is not None:
        raise ShardFailure("invalid", f"a tensor of dtype {dtype} has no plain bytes: {lack}")
    return Meta(tuple(tensor.shape), dtype, "torch")


def payload(tensor: Any) -> Bytes:
    """Return the bytes of a tensor, one-dimensional uint8; of the same memory where that is possible.

    Not possible, and so copied: what lies on a device, what is not contiguous, and what is a part of something larger,
    of which the rest would be kept alive with it.
    """
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).reshape(-1)
        base = flat
        while isinstance(base.base, np.ndarray):
            base = base.base
        return (flat.copy() if base.nbytes > flat.nbytes else flat).view(np.uint8)
    torch = sys.modules["torch"]
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.untyped_storage().nbytes() > flat.nbytes:
        flat = flat.clone()
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def itemsize(meta: Meta) -> int:
    """Bytes of one element.

    Raises:
        ShardFailure: `invalid`: there is no such dtype.
    """
    size: int
    if meta.library == "numpy":
        try:
            dtype = np.dtype(meta.dtype)
        except (TypeError, ValueError, SyntaxError):  # NumPy parses what has commas and brackets
            dtype = np.dtype(object)
        if dtype.kind not in _NUMPY_KINDS or dtype.name != meta.dtype:
            raise ShardFailure("invalid", f"NumPy has no numbers called {meta.dtype!r}")
        size = dtype.itemsize
        return size
    import torch  # noqa: PLC0415 - 2.5 s, for those who have tensors of torch

    named = getattr(torch, meta.dtype, None)
    if not isinstance(named, torch.dtype):
        raise ShardFailure("invalid", f"torch has no dtype called {meta.dtype!r}")
    size = named.itemsize
    return size


class Blank:
    """A tensor to be: memory of its size, to be filled.

    Attributes:
        meta: what it will look like.
        nbytes: its size.
    """

    __slots__ = ("_flat", "_memory", "meta", "nbytes")

    def __init__(self, meta: Meta, nbytes: int) -> None:
        """Check the size; the memory is taken when it is first asked for.

        Raises:
            ShardFailure: `invalid`: a tensor of that shape and dtype has another size.
        """
        if (expected := prod(meta.shape) * itemsize(meta)) != nbytes or min(meta.shape, default=0) < 0:
            raise ShardFailure(
                "invalid", f"{nbytes} bytes are no {meta.dtype} of shape {meta.shape}: it has {expected}"
            )
        self.meta = meta
        self.nbytes = nbytes
        self._flat: Any = None
        self._memory: memoryview | None = None

    @property
    def memory(self) -> memoryview:
        """The memory, to be written to: `nbytes` bytes.

        Raises:
            ShardFailure: `too_big`: there is not as much.
        """
        if self._memory is None:
            try:
                self._flat, self._memory = self._taken()
            except (MemoryError, RuntimeError) as error:
                raise ShardFailure("too_big", f"no memory for {self.nbytes} bytes: {error}") from error
        return self._memory

    def _taken(self) -> tuple[Any, memoryview]:
        size = self.nbytes + slack(self.nbytes)
        if self.meta.library == "numpy":
            array = np.empty(size, dtype=np.uint8)
            offset = hinted(array.ctypes.data, self.nbytes)
            part = array[offset : offset + self.nbytes]
            return part, part.data
        import torch  # noqa: PLC0415 - as above

        # torch's own memory: of a buffer lent to it, it could lend no copy-on-write tensors
        tensor = torch.empty(size, dtype=torch.uint8)
        offset = hinted(tensor.data_ptr(), self.nbytes)
        tensor = tensor[offset : offset + self.nbytes]
        return tensor, tensor.numpy().data

    def filled(self) -> Any:
        """The tensor, once its memory holds what it should; the blank is of no use afterwards."""
        memory, flat = self.memory, self._flat
        memory.release()
        if self.meta.library == "numpy":
            flat = flat.view(np.dtype(self.meta.dtype)).reshape(self.meta.shape)
            flat.setflags(write=False)
            return flat
        import torch  # noqa: PLC0415 - as above

        return flat.view(getattr(torch, self.meta.dtype)).reshape(self.meta.shape)


def lend(tensor: Any) -> Any:
    """Give out a tensor that is kept, so that nothing that is done to it changes what is kept; no bytes are copied."""
    if isinstance(tensor, np.ndarray):
        return sealed(tensor)
    lazily = getattr(tensor, "_lazy_clone", None)
    return tensor.clone() if lazily is None else lazily()
