"""What LMDeploy and SGLang are sent: read by their own rules, every tensor is there bit for bit."""

from __future__ import annotations

import base64
import pickle
import pickletools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads import lmdeploy, sglang
from rollout_svc.weights.payloads.lmdeploy import LMDeployRound
from rollout_svc.weights.payloads.metadata import LMDeployMetadata, metadata_of
from rollout_svc.weights.payloads.pickling import dumps, handle_of
from rollout_svc.weights.persistent import Parts
from tests.support.engine_pickles import LMDEPLOY_CLASS, SGLANG_CLASS, loads
from tests.support.lmdeploy_weights import Rank
from tests.support.sglang_weights import load
from tests.weights.test_bucket import DTYPES, tensor_of

Named = tuple[str, torch.Tensor]
WHOLE = Parts(buffer=True, event=False, require_clone=True, synchronize=True)
few = settings(max_examples=40, deadline=None)
shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def tensors_of(dtypes: st.SearchStrategy[torch.dtype]) -> st.SearchStrategy[list[Named]]:
    """Named tensors, strided or not, each with values of its own."""
    return st.lists(st.tuples(shapes, dtypes, st.booleans()), min_size=1, max_size=6).map(
        lambda drawn: [
            (f"p{index}", tensor_of(shape, dtype, 5 * index + 1, strided=strided))
            for index, (shape, dtype, strided) in enumerate(drawn)
        ]
    )


one_dtype = st.sampled_from(DTYPES).flatmap(lambda dtype: tensors_of(st.just(dtype)))
mixed = tensors_of(st.sampled_from(DTYPES))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(found: dict[str, torch.Tensor], wanted: Sequence[Named]) -> bool:
    """Whether these are the tensors, dtype, shape and every bit."""
    return list(found) == [name for name, _ in wanted] and all(
        found[name].dtype is tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(bits(found[name]), bits(tensor))
        for name, tensor in wanted
    )


def deliver(body: Mapping[str, Any], ranks: Sequence[Rank]) -> None:
    """Have every rank of an LMDeploy take its part of a call."""
    assert body["load_format"] == "flattened_bucket"
    given = body["serialized_named_tensors"]
    assert isinstance(given, str if len(ranks) == 1 else list)
    for index, rank in enumerate(ranks):
        rank.update(given if isinstance(given, str) else given[index], finished=body["finished"])


@few
@given(one_dtype)
def test_lmdeploy_rebuilds_what_was_sent(tensors: list[Named]) -> None:
    """P26: indices in elements of one dtype; strided sources too."""
    rank = Rank()
    rank.update(lmdeploy.payload(FlattenedBucket.pack(tensors, "elements"), WHOLE), finished=False)
    assert same(rank.weights, tensors)


@few
@given(mixed)
def test_sglang_rebuilds_what_was_sent(tensors: list[Named]) -> None:
    """P26: indices in bytes, any dtypes, strided sources too."""
    found: dict[str, torch.Tensor] = {}
    load(sglang.payload(FlattenedBucket.pack(tensors, "bytes")), found)
    assert same(found, tensors)


def test_sglang_reads_a_float_after_three_halves() -> None:
    """P26: fp32 after three bf16, which SGLang's own flattening packs and cannot read."""
    tensors = [("half", torch.arange(3).bfloat16()), ("whole", torch.tensor([1.5, -2.5]))]
    found: dict[str, torch.Tensor] = {}
    load(sglang.payload(FlattenedBucket.pack(tensors, "bytes")), found)
    assert same(found, tensors)


def test_metadata_are_those_the_engines_make() -> None:
    """P26: LMDeploy counts elements, SGLang bytes; both have shape and dtype as torch's own."""
    tensors = [("a", torch.ones(2, 3)), ("b", torch.ones(4))]
    [first, second] = loads(lmdeploy.payload(FlattenedBucket.pack(tensors, "elements"), WHOLE), LMDEPLOY_CLASS)[
        "metadata"
    ]
    assert (first.shape, first.dtype, first.start_idx, first.end_idx, first.numel) == ((2, 3), torch.float32, 0, 6, 6)
    assert type(first.shape) is torch.Size
    assert (second.start_idx, second.end_idx) == (6, 10)
    [first, second] = loads(sglang.payload(FlattenedBucket.pack(tensors, "bytes")), SGLANG_CLASS)["metadata"]
    assert (first.start_idx, first.end_idx, first.numel) == (0, 24, 24)
    assert (second.start_idx, second.end_idx, second.numel) == (32, 48, 16)


def test_neither_engine_reads_the_others_buckets() -> None:
    """P26: the units differ, so a bucket of the wrong layout is refused here, and one class is refused there."""
    tensors = [("a", torch.ones(2))]
    with pytest.raises(ValueError, match=r"lmdeploy\.utils wants indices in elements, the bucket has them in bytes"):
        lmdeploy.payload(FlattenedBucket.pack(tensors, "bytes"), WHOLE)
    elements = FlattenedBucket.pack(tensors, "elements")
    with pytest.raises(ValueError, match="tensor_bucket wants indices in bytes"):
        sglang.payload(elements)
    with pytest.raises(pickle.UnpicklingError, match=r"lmdeploy.utils.FlattenedTensorMetadata"):
        loads(lmdeploy.payload(elements, WHOLE), SGLANG_CLASS)


def test_classes_are_named_and_not_imported() -> None:
    """P34: a pickle names the engine's class, torch's own functions and types, and nothing of ours."""
    bucket = FlattenedBucket.pack([("a", torch.ones(2))], "bytes")
    data = base64.b64decode(sglang.payload(bucket))
    words = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    modules = {word for word in words if "." in word or word == "torch"}
    assert modules == {SGLANG_CLASS[0], "torch", "torch.storage", "torch.multiprocessing.reductions"}
    assert not {"sglang", "lmdeploy"} & set(sys.modules)


def test_what_another_library_replaced_is_named_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """P26: where a patch replaced torch's rebuilding function, the receiver is still told torch's name."""

    def _rebuild_cuda_tensor_modified() -> None:
        raise AssertionError

    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", _rebuild_cuda_tensor_modified)
    data = base64.b64decode(dumps({"flattened_tensor": (_rebuild_cuda_tensor_modified, ())}, {}))
    words = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    assert words == ["flattened_tensor", "torch.multiprocessing.reductions", "rebuild_cuda_tensor"]


def test_the_sharing_strategy_is_left_as_it_was() -> None:
    """Tensors on the CPU travel by file name, and the process goes on as it did."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    try:
        assert b"manager.sock" in base64.b64decode(dumps([torch.ones(2)], {}))
        handle_of(torch.ones(2))
        assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def test_every_rank_has_a_pickle_of_its_own() -> None:
    """P26: one rank is sent a string, more a list by rank; none is refused."""
    ranks = [Rank(), Rank()]
    tensors = [("a", torch.ones(2))]
    deliver(lmdeploy.body(LMDeployRound(receivers=2).bucket(tensors)), ranks)
    assert all(same(rank.weights, tensors) for rank in ranks)
    deliver(lmdeploy.body(LMDeployRound().bucket(tensors)), [Rank()])
    with pytest.raises(ValueError, match="at least one"):
        lmdeploy.body([])
    with pytest.raises(ValueError, match="at least one"):
        sglang.body([])


def test_what_cannot_be_sent_is_refused() -> None:
    """P26: an empty bucket, two dtypes for LMDeploy, a buffer to be shared without its event."""
    with pytest.raises(ValueError, match="at least one tensor"):
        LMDeployRound().bucket([])
    with pytest.raises(ValueError, match="expected one dtype"):
        LMDeployRound().bucket([("a", torch.ones(2)), ("b", torch.ones(2).half())])
    bucket = FlattenedBucket.pack([("a", torch.ones(2))], "elements")
    with pytest.raises(ValueError, match="expected the event"):
        lmdeploy.payload(bucket, Parts(buffer=True, event=True, require_clone=False, synchronize=False))
    with pytest.raises(ValueError, match="SGLang refuses an empty bucket"):
        sglang.payload(FlattenedBucket((), torch.empty(0, dtype=torch.uint8), "bytes"))
    assert list(metadata_of(bucket, LMDeployMetadata)[0].shape) == [2]
