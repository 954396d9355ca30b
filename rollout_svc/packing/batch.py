"""A batch as padded tensors in one safetensors body.

N samples in the order of the batch, groups one after the other; L tokens, those of the longest prompt and response. A
row is the prompt, then the response, then padding on the right.

| name | dtype | shape | |
|---|---|---|---|
| `input_ids` | int64 | (N, L) | 0 on padding |
| `attention_mask` | bool | (N, L) | true on prompt and response |
| `loss_mask` | uint8 | (N, L) | 1 where the model made the token and it is within the bound on tokens |
| `logprobs` | float32 | (N, L) | natural logarithms; 0 where the model did not make the token |
| `weight_versions` | int64 | (N, L) | -1 where the model did not make the token, and where nobody knows |
| `rewards` | float32 | (N,) | |
| `group_ids` | int64 | (N,) | index of the sample's group in the batch, from 0 |

Where a sample has routed experts there are `routed_experts` and `routed_experts_offsets` as well
(`rollout_svc.packing.experts`).

The metadata of the body has one key, `head`: the record of the batch as JSON, with `groups` and `samples` for what is
in no tensor. A sample that was several conversations has the last one as its row, and the others there, in
`earlier_segments`, as the JSON batch has them.

Invariants:

- What is needed of the samples is taken in one step (`rows`); packing works on values, in any thread.
- Packing lets other threads run: it never holds the interpreter for longer than it takes to read `SLICE_BYTES` of JSON.
- Each number is written once, into the body itself; routed experts are not copied at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from rollout_svc.batch import Batch
from rollout_svc.errors import IllegalTransition
from rollout_svc.heavy import Heavy
from rollout_svc.packing.experts import OFFSETS, gather
from rollout_svc.packing.header import DTYPES, Listed, write_header
from rollout_svc.producer.masking import stale_everywhere, stale_ranges, with_masked
from rollout_svc.sample import Sample
from rollout_svc.segment import VersionSpan

__all__ = ["SLICE_BYTES", "Row", "head", "listed", "pack", "rows"]

SLICE_BYTES: Final = 16 * 2**10
"""Of JSON, read at a time: about 0.1 ms."""
_WIDE: Final = (
    ("input_ids", "I64", True),
    ("weight_versions", "I64", True),
    ("group_ids", "I64", False),
    ("logprobs", "F32", True),
    ("rewards", "F32", False),
)
_NARROW: Final = (("attention_mask", "BOOL", True), ("loss_mask", "U8", True))
"""Name, dtype, and whether it is per token; large items first, so that each is aligned. Routed experts lie between."""

_EARLIER: Final = b'"earlier_segments":'
_AFTER: Final = b',"response":'  # what comes next in a record; no text can hold it, its quotes would be escaped

Tensors = dict[str, "np.ndarray[Any, Any]"]


class Row(NamedTuple):
    """What becomes of one sample.

    Attributes:
        group: index of its group.
        prompt_ids: what its conversation begins with: the prompt, shared by its group, or its own.
        record: its encoded record.
        length: of the response, tokens.
        reward: its reward.
        spans: weight versions over the response.
        masked: ranges of the response that are older than the bound on tokens.
        experts: its routed experts; None: it has none.
    """

    group: int
    prompt_ids: Sequence[int]
    record: bytes
    length: int
    reward: float
    spans: tuple[VersionSpan, ...]
    masked: list[tuple[int, int]]
    experts: Heavy | None = None


def rows(batch: Batch) -> list[Row]:
    """Take what is needed of a leased batch: it may be consumed, or given back, while it is packed.

    Raises:
        IllegalTransition: a sample is not COMPLETED.
    """
    return [_row(index, sample, batch.oldest) for index, group in enumerate(batch.groups) for sample in group.samples]


def _row(group: int, sample: Sample, oldest: int | None) -> Row:
    if sample.packed is None or sample.reward is None:
        raise IllegalTransition(f"{sample.sample_id}: {sample.status} cannot be handed over")
    return Row(
        group=group,
        prompt_ids=sample.prompt_ids,
        record=sample.packed,
        length=sample.response_length,
        reward=sample.reward,
        spans=sample.weight_versions,
        masked=stale_ranges(sample.weight_versions, oldest),
        experts=sample.experts,
    )


def head(batch: Batch) -> bytes:
    """The record of a batch without its tokens, JSON: what no tensor holds."""
    groups, samples = listed(batch)
    return orjson.dumps(batch.head() | {"groups": groups, "samples": samples})


def listed(batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a head says of each group, and of each sample."""
    groups = [
        {"group_id": group.group_id, "task": group.prompt.task, "prompt_id": group.prompt.prompt_id}
        for group in batch.groups
    ]
    samples = [
        {
            "sample_id": sample.sample_id,
            "finish_reason": sample.finish_reason,
            "engine_finish_reason": sample.engine_finish_reason,
            "reward_parts": sample.reward_parts,
            "prompt_length": len(sample.prompt_ids),
            "response_length": sample.response_length,
            **_earlier(sample, batch.oldest),
        }
        for group in batch.groups
        for sample in group.samples
    ]
    return groups, samples


def _earlier(sample: Sample, oldest: int | None) -> dict[str, orjson.Fragment]:
    if sample.packed is None or not sample.earlier_versions:
        return {}
    record = with_masked(sample.packed, *stale_everywhere(sample, oldest))
    start = record.index(_EARLIER) + len(_EARLIER)
    return {"earlier_segments": orjson.Fragment(record[start : record.index(_AFTER, start)])}


def pack(taken: Sequence[Row], told: bytes) -> list[memoryview]:
    """Make the body, in pieces to be sent one after the other.

    Args:
        taken: the rows, which become the tensors of the module's table.
        told: the head.

    Raises:
        Conflict: `experts_differ`: the samples' routed experts make no one tensor.
        SpentHandle: a sample with routed experts was consumed meanwhile.
    """
    routing = gather([row.experts for row in taken])
    most = max((len(row.prompt_ids) + row.length for row in taken), default=0)
    wide, narrow = _listed(_WIDE, len(taken), most), _listed(_NARROW, len(taken), most)
    if routing is not None:
        wide.insert(0, Listed(OFFSETS, "I64", routing.offsets.shape))
    between = [] if routing is None else [routing.listed]
    header = write_header([*wide, *between, *narrow], {"head": told.decode()})
    size = sum(tensor.nbytes for tensor in (*wide, *narrow))
    body = np.zeros(len(header) + size, dtype=np.uint8)  # untouched pages cost nothing until they are written
    body[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    tensors = _views(body[len(header) :], [*wide, *narrow])
    prompts: dict[int, np.ndarray[Any, Any]] = {}
    for index, row in enumerate(taken):
        if id(row.prompt_ids) not in prompts:  # one conversation may begin otherwise than another of its group
            prompts = {id(row.prompt_ids): np.asarray(row.prompt_ids, dtype=np.int64)}
        _write(tensors, index, row, prompts[id(row.prompt_ids)])
    if routing is None:
        return [body.data]
    tensors[OFFSETS][:] = routing.offsets
    cut = len(header) + sum(tensor.nbytes for tensor in wide)
    return [body[:cut].data, *routing.pieces(), body[cut:].data]


def _listed(layout: Iterable[tuple[str, str, bool]], samples: int, length: int) -> list[Listed]:
    return [Listed(name, dtype, (samples, length) if per_token else (samples,)) for name, dtype, per_token in layout]


def _views(data: np.ndarray[Any, Any], tensors: Iterable[Listed]) -> Tensors:
    """Each tensor, where it lies in the body."""
    views: Tensors = {}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        views[tensor.name] = data[start:end].view(DTYPES[tensor.dtype]).reshape(tensor.shape)
        start = end
    return views


def _write(tensors: Tensors, index: int, row: Row, prompt: np.ndarray[Any, Any]) -> None:
    """Write one sample into its row."""
    first, last = len(prompt), len(prompt) + row.length
    ids, logprobs = tensors["input_ids"][index], tensors["logprobs"][index]
    ids[:first] = prompt
    _read(row.record, b'"response_ids":[', ids[first:last])
    _read(row.record, b'"logprobs":[', logprobs[first:last])
    tensors["attention_mask"][index, :last] = True
    versions, mask = tensors["weight_versions"][index], tensors["loss_mask"][index]
    versions[:] = -1
    for span in row.spans:
        if span.version is not None:
            versions[first + span.start : first + span.end] = span.version
    mask[first:last] = _digits(row.record, b'"loss_mask":[', row.length)
    for start, end in row.masked:
        mask[first + start : first + end] = 0
    tensors["rewards"][index] = row.reward
    tensors["group_ids"][index] = row.group


def _read(record: bytes, key: bytes, into: np.ndarray[Any, Any]) -> None:
    """Read a list of numbers out of a record, in slices; before these lists come no others of their names."""
    at = record.index(key) + len(key)
    end = record.index(b"]", at)
    filled = 0
    while at < end:
        stop = record.find(b",", min(at + SLICE_BYTES, end), end)
        stop = end if stop < 0 else stop
        numbers = orjson.loads(b"[%b]" % record[at:stop])
        into[filled : filled + len(numbers)] = numbers
        filled += len(numbers)
        at = stop + 1


def _digits(record: bytes, key: bytes, count: int) -> np.ndarray[Any, Any]:
    """A list of single digits, as they are spelled: one digit and a comma each."""
    at = record.index(key) + len(key)
    return np.frombuffer(record, dtype=np.uint8, count=max(0, 2 * count - 1), offset=at)[::2] - ord("0")
