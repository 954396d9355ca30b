"""Routed experts in a body of tensors: every sample's rows, in the dtype that holds them all, sent where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.batch import Batch
from rollout_svc.errors import Conflict, ServiceError, SpentHandle
from rollout_svc.ledger import Ledger
from rollout_svc.packing.batch import head, pack, rows
from rollout_svc.packing.experts import gather, pack_experts
from rollout_svc.packing.reading import experts_of, read_batch, read_experts
from rollout_svc.tensors import Handles, Loan, ReadHandle
from tests.support.routed import own, ready_group, routing

DTYPES = ("uint8", "uint16")
groups = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.sampled_from(DTYPES)), min_size=1, max_size=4
)


def batch_of(shapes: list[tuple[int, int, bool, str]], handles: Handles) -> Batch:
    """Make a batch of groups of some size and tokens, with routed experts of a dtype or without."""
    made = [
        ready_group(Ledger(), handles, f"g{n}", size=size, tokens=tokens, routed=routed, dtype=dtype)
        for n, (size, tokens, routed, dtype) in enumerate(shapes)
    ]
    return Batch("b", 0, tuple(made), {})


@settings(max_examples=40, deadline=None)
@given(groups)
def test_every_sample_has_its_own_rows(shapes: list[tuple[int, int, bool, str]]) -> None:
    """Whatever samples have some, rows lie one after the other, and everything else is as it is without them."""
    batch = batch_of(shapes, Handles())
    pieces = pack(rows(batch), head(batch))
    told = read_batch(b"".join(pieces))
    wanted = {name: handle.read() for name, handle in batch.take_experts().items()}
    found = experts_of(told)
    assert found.keys() == wanted.keys()
    for name, experts in wanted.items():
        assert np.array_equal(found[name], experts)
    tensors: dict[str, torch.Tensor] = told["tensors"]
    assert ("routed_experts" in tensors) == ("routed_experts_offsets" in tensors) == bool(wanted)
    if wanted:
        widest = max((experts.dtype for experts in wanted.values()), key=lambda dtype: dtype.itemsize)
        assert tensors["routed_experts"].numpy().dtype == widest
        lengths = [len(wanted.get(sample["sample_id"], ())) for sample in told["samples"]]
        assert tensors["routed_experts_offsets"].tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    without = batch_of([(size, tokens, False, dtype) for size, tokens, _, dtype in shapes], Handles())
    plain = read_batch(b"".join(pack(rows(without), head(without))))["tensors"]
    assert plain.keys() == tensors.keys() - {"routed_experts", "routed_experts_offsets"}
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)


def test_they_are_not_copied() -> None:
    """What is sent of a sample is its array itself, and stays what it is when its owner releases it."""
    handles = Handles()
    batch = batch_of([(1, 4, True, "uint8")], handles)
    array = batch.take_experts()["g0.0"].read()
    pieces = pack(rows(batch), head(batch))
    assert len(pieces) == 3
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), array)
    owned = batch.groups[0].samples[0].experts
    assert owned is not None
    owned.release("the ack")
    assert bytes(pieces[1]) == routing("g0.0", 6).tobytes()
    with pytest.raises(SpentHandle):
        pack(rows(batch), head(batch))


def test_every_tensor_is_aligned() -> None:
    """Also with 16 bits a number, and an odd number of rows."""
    for tokens in range(1, 4):
        body = b"".join(pack(rows(one := batch_of([(1, tokens, True, "uint16")], Handles())), head(one)))
        size = int.from_bytes(body[:8], "little")
        for name, told in orjson.loads(body[8 : 8 + size]).items():
            if name != "__metadata__":
                item = {"I64": 8, "F32": 4, "U16": 2}.get(told["dtype"], 1)
                assert (8 + size + told["data_offsets"][0]) % item == 0


def test_models_that_differ_make_no_one_tensor() -> None:
    """It is said by name, with both shapes."""
    handles = Handles()
    with pytest.raises(Conflict, match=r"\(3, 2\), \(4, 2\)") as refused:
        gather([own(handles, routing("a", 5, layers=layers)) for layers in (3, 4)])
    assert refused.value.type == "experts_differ"
    assert gather([None, None]) is None


@settings(deadline=None)
@given(st.integers(0, 9), st.sampled_from(DTYPES))
def test_one_sample_alone_comes_back(count: int, dtype: str) -> None:
    """A body of one array, of no rows too."""
    experts = routing("a", count, dtype)
    found = read_experts(b"".join(pack_experts(ReadHandle("a", own(Handles(), experts), Loan()))))
    assert (found.dtype, found.shape) == (experts.dtype, experts.shape)
    assert np.array_equal(found, experts)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_rubbish_is_an_error(body: bytes) -> None:
    """Bytes that are no routed experts are a ServiceError, nothing else."""  # P34
    with pytest.raises(ServiceError):
        read_experts(body)


@pytest.mark.parametrize("offsets", [[0, 9], [0, 2, 1, 6], [1, 6], [0, 6, 6]])
def test_offsets_that_do_not_fit_are_an_error(offsets: list[int]) -> None:
    """Too few, not in order, not from the start, not to the end."""  # P34
    tensors = {"routed_experts": torch.zeros(6, 2, 2), "routed_experts_offsets": torch.tensor(offsets)}
    told: dict[str, Any] = {"tensors": tensors, "samples": [{"sample_id": "a"}]}
    with pytest.raises(ServiceError, match="do not fit"):
        experts_of(told)
