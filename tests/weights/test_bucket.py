"""Flattened buckets: what is packed is what is unpacked, and what cannot be is refused before a byte is written."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.weights.bucket import ALIGNMENT, FlattenedBucket, Layout, TensorMeta, cut, lay_out

LAYOUTS: tuple[Layout, ...] = ("elements", "bytes")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0, *, strided: bool = False) -> torch.Tensor:
    """Make a tensor that tells its place: element i is `first + i`; strided: every other column of a wider one."""
    made = torch.arange(first, first + math.prod(shape)).reshape(shape)
    if strided and shape:
        wide = torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)
        wide[..., ::2] = made.to(dtype)
        return wide[..., ::2]
    return made.to(dtype)


named = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8).map(
    lambda drawn: [
        (f"p{index}", tensor_of(shape, dtype, index, strided=strided))
        for index, (shape, dtype, strided) in enumerate(drawn)
    ]
)


@given(named)
def test_bytes_take_any_dtypes(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """P26: mixed dtypes, strided or not, come back bit for bit, each where its dtype can be viewed."""
    bucket = FlattenedBucket.pack(tensors, "bytes")
    assert bucket.buffer.dtype is torch.uint8
    assert all(meta.start % ALIGNMENT == 0 for meta in bucket.metadata)
    for (name, found), (wanted_name, wanted) in zip(bucket.unpack(), tensors, strict=True):
        assert name == wanted_name
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)


@given(named, st.sampled_from(DTYPES))
def test_elements_lie_side_by_side(tensors: list[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """P26: one dtype, indices in elements, no gaps: as LMDeploy's consumer cuts it."""
    same = [(name, tensor.to(dtype)) for name, tensor in tensors]
    bucket = FlattenedBucket.pack(same, "elements")
    assert torch.equal(bucket.buffer, torch.cat([tensor.reshape(-1) for _, tensor in same]))
    at = 0
    for meta, (_, tensor) in zip(bucket.metadata, same, strict=True):
        assert (meta.start, meta.end, meta.numel) == (at, at + tensor.numel(), tensor.numel())
        at = meta.end


@given(named)
def test_metadata_travel_as_json(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Metadata come back from their record, and rebuild the tensors from the buffer alone."""
    sent = FlattenedBucket.pack(tensors, "bytes")
    received = FlattenedBucket([TensorMeta.from_json(meta.as_json()) for meta in sent.metadata], sent.buffer, "bytes")
    assert received.metadata == sent.metadata
    for (_, found), (_, wanted) in zip(received.unpack(), tensors, strict=True):
        assert torch.equal(found, wanted)


def test_an_fp32_after_three_bf16_can_be_rebuilt() -> None:
    """P26: without padding its offset would be 6, and no view of 4-byte items begins there."""
    tensors = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.full((2,), 2.0))]
    bucket = FlattenedBucket.pack(tensors, "bytes")
    assert [meta.start for meta in bucket.metadata] == [0, ALIGNMENT]
    assert dict(bucket.unpack())["b"].tolist() == [2.0, 2.0]


def test_what_is_unpacked_are_views_of_the_buffer() -> None:
    """Reconstruction copies nothing: a change of the buffer is seen through the tensors."""
    for layout in LAYOUTS:
        bucket = FlattenedBucket.pack([("a", torch.zeros(2, 2))], layout)
        [(_, found)] = bucket.unpack()
        bucket.buffer.fill_(1)
        assert found.count_nonzero() == 4


def test_a_given_buffer_is_used_and_may_be_longer() -> None:
    """A persistent buffer is written to in place, and what it held behind the bucket stays."""
    buffer = torch.full((8,), 9.0)
    bucket = FlattenedBucket.pack([("a", torch.ones(3))], "elements", into=buffer)
    assert bucket.buffer is buffer
    assert buffer.tolist() == [1, 1, 1, 9, 9, 9, 9, 9]
    assert bucket.used == 3


@pytest.mark.parametrize(
    ("buffer", "told"),
    [
        (lambda: torch.zeros(2, 4), "dimensions 1, not 2"),
        (lambda: torch.zeros(3), "at least 4 items, not 3"),
        (lambda: torch.zeros(4, dtype=torch.float64), "dtype torch.float32, not torch.float64"),
        (lambda: torch.zeros(8)[::2], "contiguous True, not False"),
        (lambda: torch.zeros(4, device="meta"), "device cpu, not meta"),
        (lambda: torch.zeros(8)[1:], "a start at a multiple of 16 bytes"),
        (lambda: bytearray(16), "a tensor, not bytearray"),
        (lambda: np.zeros(4, np.float32), "a tensor, not ndarray"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: Callable[[], Any], told: str) -> None:
    """P26: expected and given are named, and no byte was written."""
    given_buffer = buffer()
    tensor = isinstance(given_buffer, torch.Tensor) and not given_buffer.is_meta
    before = given_buffer.clone() if tensor else None
    with pytest.raises(ValueError, match=f"buffer: expected {told}"):
        FlattenedBucket.pack([("a", torch.ones(4))], "elements", into=given_buffer)
    assert before is None or torch.equal(given_buffer, before)


@pytest.mark.parametrize(
    ("tensors", "layout", "told"),
    [
        ([], "bytes", "at least one tensor"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "bytes", "each name once, not 'a' twice"),
        ([("a", torch.ones(1)), ("b", torch.ones(1).double())], "elements", "one dtype: 'a' is torch.float32, 'b'"),
        ([("a", torch.ones(1)), ("b", torch.ones(1, device="meta"))], "bytes", "dense tensors with data; 'b'"),
        ([("a", torch.eye(2).to_sparse())], "bytes", "dense tensors with data; 'a': it is torch.sparse_coo"),
    ],
)
def test_tensors_that_cannot_share_a_bucket_are_refused(tensors: Any, layout: Layout, told: str) -> None:
    """P26: what cannot be packed is named."""
    with pytest.raises(ValueError, match=told):
        FlattenedBucket.pack(tensors, layout)


class Sharded(torch.Tensor):
    """As a DTensor: the shape of the whole, and a part of its data in another tensor."""

    local: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> torch.Tensor:
        return sharded(inner["local"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(function, types, args, kwargs)


def sharded(local: torch.Tensor) -> torch.Tensor:
    """Say that it is the first half of a tensor."""
    made = torch.Tensor._make_wrapper_subclass(Sharded, (2 * local.shape[0],), dtype=local.dtype)
    made.local = local
    return made


def freed() -> torch.Tensor:
    """As a parameter that its owner has given the memory of back: the shape is there still."""
    made = torch.ones(4)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (freed, "its memory was given back"),
        (lambda: sharded(torch.ones(2)), "it is a Sharded, whose data are elsewhere: gather it first"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8), "it is quantized"),
        (torch.ones(4).to_mkldnn, "dense tensors with data"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_tensors_without_their_bytes_are_refused(tensor: Callable[[], torch.Tensor], told: str, layout: Layout) -> None:
    """P26: of a sharded or freed one there is nothing to copy, of a quantized one not all; nothing was written."""
    made = tensor()
    buffer = torch.zeros(64, dtype=torch.uint8 if layout == "bytes" else made.dtype) if not made.is_quantized else None
    with pytest.raises(ValueError, match=f"'a'.*{told}|{told}.*'a'"):
        FlattenedBucket.pack([("a", made)], layout, into=buffer)
    assert buffer is None or not buffer.count_nonzero()


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        (TensorMeta("a", (5,), "float32", 0, 5, 5), "'a' ends at 5, the buffer at 4"),
        (TensorMeta("a", (2,), "bfloat16", 0, 2, 2), "expected the buffer's dtype torch.float32, not torch.bfloat16"),
        (TensorMeta("a", (2,), "float32", 0, 3, 2), "2 elements do not lie at 0 to 3"),
        (TensorMeta("a", (2,), "float31", 0, 2, 2), "torch has no dtype 'float31'"),
        (TensorMeta("a", (2,), "Tensor", 0, 2, 2), "torch has no dtype 'Tensor'"),
    ],
)
def test_metadata_that_do_not_fit_the_buffer_are_refused(meta: TensorMeta, told: str) -> None:
    """P26: metadata past the buffer, or of another dtype than the one it has now, never become a tensor."""
    with pytest.raises(ValueError, match=told):
        FlattenedBucket([meta], torch.zeros(4), "elements")


@pytest.mark.parametrize(
    ("metas", "told"),
    [
        ([TensorMeta("a", (3,), "float32", 0, 3, 3), TensorMeta("b", (2,), "float32", 2, 4, 2)], "'a' ends at 3, 'b'"),
        ([TensorMeta("b", (1,), "float32", 1, 2, 1), TensorMeta("a", (4,), "float32", 0, 4, 4)], "'a' ends at 4, 'b'"),
        ([TensorMeta("a", (1,), "float32", 0, 1, 1), TensorMeta("a", (1,), "float32", 1, 2, 1)], "not 'a' twice"),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(metas: list[TensorMeta], told: str) -> None:
    """P26: of tensors that share bytes, or a name, one would be loaded as the other."""
    with pytest.raises(ValueError, match=told):
        FlattenedBucket(metas, torch.zeros(4), "elements")


def test_a_bucket_is_made_of_a_tensor() -> None:
    """P26: what was received as something else is named."""
    with pytest.raises(ValueError, match="buffer: expected a tensor, not list"):
        FlattenedBucket([], [0.0], "elements")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"name": "a", "shape": [2], "dtype": "float32", "start": 0, "end": 2, "numel": 3},
        {"name": "a", "shape": [-1], "dtype": "float32", "start": 0, "end": 2, "numel": -1},
        {"name": "a", "shape": [True], "dtype": "float32", "start": 0, "end": 1, "numel": 1},
        {"name": "a", "shape": 2, "dtype": "float32", "start": 0, "end": 2, "numel": 2},
        {"name": "a", "shape": [2], "dtype": 5, "start": 0, "end": 2, "numel": 2},
        {"name": 5, "shape": [2], "dtype": "float32", "start": 0, "end": 2, "numel": 2},
    ],
)
def test_a_record_that_is_none_is_refused(record: dict[str, Any]) -> None:
    """P35: metadata from elsewhere are checked before they are used."""
    with pytest.raises(ValueError, match=r"metadata of"):
        TensorMeta.from_json(record)


@given(named, st.integers(1, 400), st.sampled_from(LAYOUTS))
def test_buckets_are_cut_by_bytes(tensors: list[tuple[str, torch.Tensor]], most: int, layout: Layout) -> None:
    """Every tensor is in one bucket, in order; a bucket is larger than was asked for only if one tensor is."""
    buckets = list(cut(iter(tensors), most, layout))
    assert [pair for bucket in buckets for pair in bucket] == tensors
    for bucket in buckets:
        packed = FlattenedBucket.pack(bucket, layout)
        assert packed.buffer.nbytes <= most or len(bucket) == 1
        assert layout == "bytes" or len({tensor.dtype for _, tensor in bucket}) == 1


def test_cutting_holds_one_bucket_of_a_stream() -> None:
    """Tensors are asked for when their bucket is made, not before: peak memory is a bucket."""
    asked: list[int] = []

    def stream() -> Any:
        for index in range(10):
            asked.append(index)
            yield f"p{index}", torch.zeros(4)

    buckets = cut(stream(), 32, "elements")
    next(buckets)
    assert asked == [0, 1, 2]


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), max_size=8), st.sampled_from(LAYOUTS))
def test_places_do_not_overlap(drawn: list[tuple[tuple[int, ...], int]], layout: Layout) -> None:
    """The layout is pure: places follow each other, and end where the length says."""
    metadata, size = lay_out(((f"p{i}", shape, "any", item) for i, (shape, item) in enumerate(drawn)), layout)
    ends = [0, *(meta.end for meta in metadata)]
    assert all(meta.start >= end for meta, end in zip(metadata, ends, strict=False))
    assert size == ends[-1]


def test_a_buffer_that_holds_the_tensors_is_refused() -> None:
    """P26: packed over themselves, some would be written before they are read: wrong weights without a word."""
    buffer = torch.arange(16.0)
    tensors = [("a", buffer[4:8]), ("b", buffer[0:4])]
    with pytest.raises(ValueError, match="memory of its own, but 'a' lies in it"):
        FlattenedBucket.pack(tensors, "elements", into=buffer)
    assert buffer.tolist() == list(range(16))
    beside = FlattenedBucket.pack(tensors, "elements", into=torch.empty(8))
    assert [tensor.tolist() for _, tensor in beside.unpack()] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_buffer_that_begins_between_items_is_refused() -> None:
    """P26: what was received is refused as a whole, before anything is unpacked."""
    meta = TensorMeta("a", (2,), "float32", 0, 8, 2)
    with pytest.raises(ValueError, match="'a': expected a start at a multiple of 4 bytes"):
        FlattenedBucket([meta], torch.zeros(20, dtype=torch.uint8)[1:], "bytes")
