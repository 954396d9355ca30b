"""A batch as tensors says what its JSON record says, whatever is in it; and what is no such batch is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.batch import Batch
from rollout_svc.errors import IllegalTransition, ServiceError
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.packing.batch import SLICE_BYTES, head, pack, rows
from rollout_svc.packing.reading import read_batch
from rollout_svc.sample import SampleStatus
from rollout_svc.segment import Segment, VersionSpan
from tests.support.groups import make_group, make_prompt

TokenId = st.integers(0, 2**40)
logprobs = st.floats(-1e3, 0)
version = st.none() | st.integers(0, 5)
segments = st.lists(
    st.tuples(st.lists(st.tuples(TokenId, logprobs), min_size=1, max_size=6), version, st.booleans()), max_size=4
)
members = st.lists(segments, min_size=1, max_size=3)
DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.uint8,
    "logprobs": torch.float32,
    "weight_versions": torch.int64,
    "rewards": torch.float32,
    "group_ids": torch.int64,
}


def made_of(prompt: list[int], samples: list[Any], number: int) -> Group:
    """Make a group that is ready, of these segments."""
    group = Group(
        group_id=f"g{number}", prompt=make_prompt(input_ids=prompt), size=len(samples), lane="train", ledger=Ledger()
    )
    group.start()
    for sample, parts in zip(group.samples, samples, strict=True):
        attempt = sample.hand_out()
        for tokens, made_by, by_model in parts:
            ids = [token for token, _ in tokens]
            spans = (VersionSpan(made_by, 0, len(ids)),) if by_model else ()
            values = [value if by_model else 0.0 for _, value in tokens]
            sample.extend(attempt, Segment(ids, values, spans, by_model=by_model))
        sample.finish_reason, sample.response = "stop", 'it says "logprobs":[0] and ]'
        sample.transition(attempt, SampleStatus.GENERATED)
        sample.transition(attempt, SampleStatus.JUDGING)
        sample.grade(attempt, 0.5 + sample.index, {"response_ids": 1.0})
    group.finish(1.0)
    return group


def single(values: list[float]) -> list[float]:
    """Round numbers to single precision."""
    rounded: list[float] = np.array(values, dtype=np.float32).tolist()
    return rounded


def sent(batch: Batch) -> dict[str, Any]:
    """Pack a batch and read it again."""
    return read_batch(b"".join(pack(rows(batch), head(batch))))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(TokenId, min_size=1, max_size=5), members), min_size=1, max_size=3),
    st.none() | st.integers(-1, 6),
)
def test_it_says_what_the_record_says(groups: list[tuple[list[int], Any]], oldest: int | None) -> None:
    """Every token, mask, logprob, version and reward is where the JSON has it, right-padded, masked alike."""  # P32
    made = tuple(made_of(prompt, samples, number) for number, (prompt, samples) in enumerate(groups))
    batch = Batch("b", 3, made, {"reward_mean": 0.5}, ("gone",), oldest)
    told = sent(batch)
    record = batch.as_json()
    tensors = told["tensors"]
    assert {name: tensor.dtype for name, tensor in tensors.items()} == DTYPES
    samples = [(number, sample) for number, group in enumerate(record["groups"]) for sample in group["samples"]]
    longest = max(len(sample["prompt_ids"]) + len(sample["response_ids"]) for _, sample in samples)
    for name, tensor in tensors.items():
        assert tensor.shape == ((len(samples),) if name in ("rewards", "group_ids") else (len(samples), longest))
    for row, (number, sample) in enumerate(samples):
        first, count = len(sample["prompt_ids"]), len(sample["response_ids"])
        pad = longest - first - count
        versions = [-1] * count
        for span in sample["weight_versions"]:
            known = -1 if span["version"] is None else span["version"]
            versions[span["start"] : span["end"]] = [known] * (span["end"] - span["start"])
        wanted = {
            "input_ids": sample["prompt_ids"] + sample["response_ids"] + [0] * pad,
            "attention_mask": [True] * (first + count) + [False] * pad,
            "loss_mask": [0] * first + sample["loss_mask"] + [0] * pad,
            "logprobs": single([0.0] * first + sample["logprobs"] + [0.0] * pad),
            "weight_versions": [-1] * first + versions + [-1] * pad,
        }
        assert {name: tensors[name][row].tolist() for name in wanted} == wanted
        assert (tensors["rewards"][row].item(), tensors["group_ids"][row].item()) == (sample["reward"], number)
        said = told["samples"][row]
        assert (said["prompt_length"], said["response_length"]) == (first, count)
        for key in ("sample_id", "finish_reason", "engine_finish_reason", "reward_parts"):
            assert said[key] == sample[key]
    for key in ("batch_id", "step", "metrics", "ack_expired"):
        assert told[key] == record[key]
    assert [(group["group_id"], group["task"], group["prompt_id"]) for group in told["groups"]] == [
        (group["group_id"], group["task"], group["prompt"]["id"]) for group in record["groups"]
    ]


def test_long_lists_are_read_in_slices() -> None:
    """A list that is many slices long comes whole, wherever the slices are cut."""
    count = SLICE_BYTES // 3
    tokens = [(10**index % 99_991, -index / 7) for index in range(count)]
    batch = Batch("b", 0, (made_of([1], [[(tokens, 0, True)]], 0),), {})
    tensors = sent(batch)["tensors"]
    assert tensors["input_ids"][0, 1:].tolist() == [token for token, _ in tokens]
    assert tensors["logprobs"][0, 1:].tolist() == single([value for _, value in tokens])


def test_the_data_is_aligned() -> None:
    """Each tensor begins at a multiple of its item's size, so that it can be used where it lies."""
    for length in range(1, 9):
        batch = Batch("b" * length, 0, (made_of([1] * length, [[([(1, -1.0)], 0, True)]], 0),), {})
        body = b"".join(pack(rows(batch), head(batch)))
        size = int.from_bytes(body[:8], "little")
        header = orjson.loads(body[8 : 8 + size])
        assert size % 8 == 0
        for name, told in header.items():
            if name != "__metadata__":
                item = {"I64": 8, "F32": 4}.get(told["dtype"], 1)
                assert (8 + size + told["data_offsets"][0]) % item == 0


def test_what_is_not_completed_is_not_packed() -> None:
    """A sample without a reward is an error here, never a 0."""  # P2
    with pytest.raises(IllegalTransition):
        rows(Batch("b", 0, (make_group(),), {}))


SMALL = Batch("b", 0, (made_of([1], [[]], 0),), {})
GOOD = b"".join(pack(rows(SMALL), head(SMALL)))


def mangled(at: int, bits: int) -> bytes:
    """Change one byte of a good body, or cut it there."""
    if bits % 3 == 0:
        return GOOD[:at]
    at %= len(GOOD)
    return GOOD[:at] + bytes([GOOD[at] ^ bits]) + GOOD[at + 1 :]


@settings(deadline=None)
@given(st.binary(max_size=40) | st.builds(mangled, st.integers(0, 600), st.integers(1, 255)))
def test_rubbish_is_an_error(body: bytes) -> None:
    """Bytes that are no batch of tensors are a ServiceError, nothing else."""  # P34
    try:
        told = read_batch(body)
    except ServiceError:
        return
    assert isinstance(told["tensors"], dict)
