"""Flattened buckets: many named tensors in one contiguous buffer, and where each of them lies.

| layout | indices | dtypes | spoken by |
|---|---|---|---|
| `elements` | in elements of the buffer | one per bucket | LMDeploy (`lmdeploy/utils.py`, FlattenedTensorBucket) |
| `bytes` | in bytes of a uint8 buffer | any | SGLang (`srt/weight_sync/tensor_bucket.py`) |

In layout `bytes` each tensor begins at a multiple of 16: a view of another dtype needs an offset that its items divide,
and without padding an fp32 tensor after three bf16 elements could be written and never be read.

Invariants:

- Whatever is wrong is refused before a byte is written, by an error that names what was expected and what was given.
- What `unpack` returns are views of the buffer; nothing is copied.
- Metadata are values and know nothing of the buffer: they may travel without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from rollout_svc.copying import copy_all
from rollout_svc.dense import lack_of
from rollout_svc.spans import clash_of

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "FlattenedBucket", "Layout", "TensorMeta", "cut", "lay_out"]

Layout = Literal["elements", "bytes"]
Named = tuple[str, "torch.Tensor"]

ALIGNMENT: Final = 16
"""Bytes: the widest item there is, complex128."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Where one tensor lies in a bucket.

    Attributes:
        name: of the parameter, as in a checkpoint.
        shape: of the tensor.
        dtype: torch's name of it, without `torch.`.
        start: first index, in the unit of the layout.
        end: one past the last.
        numel: elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int
    numel: int

    def as_json(self) -> dict[str, Any]:
        """The record in which it travels."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "start": self.start,
            "end": self.end,
            "numel": self.numel,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read a record; raises ValueError for one that is none."""
        try:
            meta = cls(**{**record, "shape": tuple(record["shape"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no metadata of a tensor: {error}") from error
        numbers = (*meta.shape, meta.start, meta.end, meta.numel)
        named = isinstance(meta.name, str) and isinstance(meta.dtype, str)
        whole = all(type(number) is int and number >= 0 for number in numbers)
        if not named or not whole or math.prod(meta.shape) != meta.numel:
            raise ValueError(f"metadata of {meta.name!r} contradict themselves: {record}")
        return meta


class FlattenedBucket:
    """Named tensors in one buffer; see the module's table and invariants.

    Attributes:
        metadata: of each tensor, in order; empty: nothing follows, the update is finished.
        buffer: 1-D; of the tensors' dtype in layout `elements`, uint8 in `bytes`. It may be longer than what is in it.
        layout: unit of the metadata's indices.
    """

    __slots__ = ("buffer", "layout", "metadata")

    def __init__(self, metadata: Sequence[TensorMeta], buffer: torch.Tensor, layout: Layout) -> None:
        """Put together what was received.

        Raises:
            ValueError: the metadata do not fit the buffer, or each other: a name twice, tensors that overlap.
        """
        _check_is_tensor(buffer)
        self.metadata = tuple(metadata)
        self.buffer = buffer
        self.layout: Layout = layout
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"expected a contiguous 1-D buffer, not one of shape {tuple(buffer.shape)}")
        for meta in self.metadata:
            _check_place(meta, buffer, layout)
        if (clash := clash_of((meta.name, meta.start, meta.end) for meta in self.metadata)) is not None:
            raise ValueError(clash)

    def __repr__(self) -> str:
        return f"<FlattenedBucket {len(self.metadata)} tensors, {self.used} of {self.buffer.numel()} {self.layout}>"

    @property
    def used(self) -> int:
        """Length of what is in the buffer, in the unit of the layout."""
        return max((meta.end for meta in self.metadata), default=0)

    @classmethod
    def pack(cls, tensors: Sequence[Named], layout: Layout, *, into: torch.Tensor | None = None) -> Self:
        """Copy tensors into one buffer, strided ones too; nothing else is allocated.

        Args:
            tensors: names and tensors, at least one, all on one device, and in layout `elements` of one dtype.
            layout: unit of the indices.
            into: a buffer to use, 1-D, contiguous, long enough, on the tensors' device, and none of them in it; None: a
                new one.

        Raises:
            ValueError: the tensors cannot share a bucket, or the buffer cannot take them; nothing was written.
        """
        import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

        _check_tensors(tensors, layout)
        metadata, size = lay_out(
            ((name, tuple(tensor.shape), _name_of(tensor.dtype), tensor.itemsize) for name, tensor in tensors), layout
        )
        dtype = torch.uint8 if layout == "bytes" else tensors[0][1].dtype
        device = tensors[0][1].device
        if into is None:
            into = torch.empty(size, dtype=dtype, device=device)
        else:
            _check_is_tensor(into)
            _check_buffer(into, dtype, device, size)
            _check_apart(into, tensors)
        bucket = cls(metadata, into, layout)
        copy_all([(view, tensor) for (_, view), (_, tensor) in zip(bucket.unpack(), tensors, strict=True)])
        return bucket

    def unpack(self) -> Iterator[Named]:
        """Each name and its tensor, a view of the buffer."""
        import torch  # noqa: PLC0415

        for meta in self.metadata:
            dtype: torch.dtype = getattr(torch, meta.dtype)
            yield meta.name, self.buffer[meta.start : meta.end].view(dtype).view(meta.shape)


def lay_out(
    tensors: Iterable[tuple[str, tuple[int, ...], str, int]], layout: Layout
) -> tuple[tuple[TensorMeta, ...], int]:
    """Say where each tensor goes; pure.

    Args:
        tensors: name, shape, dtype and bytes of an item, of each.
        layout: unit of the indices.

    Returns:
        the metadata, and the length of the buffer they need, in the unit of the layout.
    """
    metadata = []
    at = 0
    for name, shape, dtype, itemsize in tensors:
        numel = math.prod(shape)
        start = -(-at // ALIGNMENT) * ALIGNMENT if layout == "bytes" else at
        at = start + numel * (itemsize if layout == "bytes" else 1)
        metadata.append(TensorMeta(name, shape, dtype, start, at, numel))
    return tuple(metadata), at


def cut(tensors: Iterable[Named], bucket_bytes: int, layout: Layout) -> Iterator[list[Named]]:
    """Cut a stream of tensors into buckets; no more of them are held than one bucket's.

    A bucket ends before the tensor that would make it larger than `bucket_bytes`, and in layout `elements` where the
    dtype changes. A tensor that is larger by itself has a bucket of its own.

    Args:
        tensors: names and tensors, in the order they are sent.
        bucket_bytes: most bytes of a bucket, padding included.
        layout: in which they will be packed.

    Raises:
        ValueError: `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"expected buckets of at least 1 byte, not {bucket_bytes}")
    held: list[Named] = []
    size = 0
    for name, tensor in tensors:
        padded = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        other = layout == "elements" and bool(held) and held[0][1].dtype is not tensor.dtype
        if held and (size + padded > bucket_bytes or other):
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += padded
    if held:
        yield held


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensors(tensors: Sequence[Named], layout: Layout) -> None:

    if not tensors:
        raise ValueError("expected at least one tensor: an empty bucket says that the update is finished")
    names = [name for name, _ in tensors]
    if len(set(names)) < len(names):
        raise ValueError(
            f"expected each name once, not {next(name for name in names if names.count(name) > 1)!r} twice"
        )
    first = tensors[0]
    for name, tensor in tensors:
        if (lack := lack_of(tensor)) is not None:
            raise ValueError(f"expected dense tensors with data; {name!r}: {lack}")
        if tensor.device != first[1].device:
            raise ValueError(f"expected one device: {first[0]!r} is on {first[1].device}, {name!r} on {tensor.device}")
        if layout == "elements" and tensor.dtype is not first[1].dtype:
            raise ValueError(f"expected one dtype: {first[0]!r} is {first[1].dtype}, {name!r} {tensor.dtype}")


def _check_is_tensor(buffer: object) -> None:
    import torch  # noqa: PLC0415

    if not isinstance(buffer, torch.Tensor):
        raise ValueError(f"buffer: expected a tensor, not {type(buffer).__name__}")  # noqa: TRY004 - as for its shape


def _check_buffer(buffer: torch.Tensor, dtype: torch.dtype, device: torch.device, size: int) -> None:
    """Raise ValueError for a buffer that cannot take `size` items."""
    for what, expected, given in (
        ("dimensions", 1, buffer.dim()),
        ("dtype", dtype, buffer.dtype),
        ("device", device, buffer.device),
        ("contiguous", True, buffer.is_contiguous()),
    ):
        if expected != given:
            raise ValueError(f"buffer: expected {what} {expected}, not {given}")
    if buffer.numel() < size:
        raise ValueError(f"buffer: expected at least {size} items, not {buffer.numel()}")
    if buffer.data_ptr() % ALIGNMENT or buffer.storage_offset() * buffer.itemsize % ALIGNMENT:
        raise ValueError(f"buffer: expected a start at a multiple of {ALIGNMENT} bytes")


def _check_apart(buffer: torch.Tensor, tensors: Sequence[Named]) -> None:
    """Raise ValueError for a tensor that is in the buffer: others would be written over it before it is read."""
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    for name, tensor in tensors:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() and tensor.data_ptr() < end and begin < tensor.data_ptr() + (reach + 1) * tensor.itemsize:
            raise ValueError(f"buffer: expected memory of its own, but {name!r} lies in it")


def _check_place(meta: TensorMeta, buffer: torch.Tensor, layout: Layout) -> None:
    """Raise ValueError for a tensor that is not where its metadata say, or cannot be viewed there."""
    import torch  # noqa: PLC0415

    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{meta.name!r}: torch has no dtype {meta.dtype!r}")  # noqa: TRY004 - a value from elsewhere
    if layout == "elements" and dtype is not buffer.dtype:
        raise ValueError(f"{meta.name!r}: expected the buffer's dtype {buffer.dtype}, not {dtype}")
    if layout == "bytes" and buffer.dtype is not torch.uint8:
        raise ValueError(f"expected a buffer of uint8 for byte indices, not {buffer.dtype}")
    unit = 1 if layout == "elements" else dtype.itemsize
    if meta.end - meta.start != meta.numel * unit or meta.start % unit:
        raise ValueError(f"{meta.name!r}: {meta.numel} elements do not lie at {meta.start} to {meta.end} ({layout})")
    if layout == "bytes" and (buffer.storage_offset() + meta.start) % dtype.itemsize:
        raise ValueError(f"{meta.name!r}: expected a start at a multiple of {dtype.itemsize} bytes of the storage")
    if meta.end > buffer.numel():
        raise ValueError(f"{meta.name!r} ends at {meta.end}, the buffer at {buffer.numel()} ({layout})")
