"""Samples and prompts, to and from the bytes a journal keeps of them; pure.

A sample is two blobs: its state as JSON, and its tokens in safetensors:

- unfinished: `ids` (int32, int64 where an id needs it), `logprobs` (float64, so that not one bit changes), `segments`
  (int64, of each: length, turn, by_model) and `spans` (int64, of each: segment, start, end, version, whether there is
  one, confirmed);
- COMPLETED: `record` (uint8): the encoded record that it has become, as it will be sent. Taking it apart into tensors,
  and putting it together again at a start, would halve the file, and take a tenth of the interpreter's time per sample.

Invariants:

- What comes back is what went in; a COMPLETED sample's record is the same byte for byte.
- An unfinished sample whose tokens are none comes back without them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt
import orjson
from safetensors.numpy import load

from rollout_svc.prompt import Prompt
from rollout_svc.sample.state import SampleState
from rollout_svc.segment import Segment, VersionSpan, spans_of

__all__ = ["decode_ids", "decode_prompt", "decode_sample", "encode_ids", "encode_prompt", "encode_sample", "state_json"]

_Array = npt.NDArray[Any]
_DTYPES: Final = {"i": "I32", "q": "I64", "d": "F64"}  # safetensors' name of an array's type; little-endian, as it is
_KEPT_AS_JSON: Final = ("attempt", "failures", "turn", "resume_at", "finish_reason", "engine_finish_reason", "meta")


# -- samples ---------------------------------------------------------------------------------------------------


def state_json(state: SampleState) -> bytes | None:
    """An unfinished sample's state without its tokens, JSON; None for a COMPLETED one, whose record has it all.

    What its agent put into `meta` and cannot be written down is left out.
    """
    if state.packed is not None:
        return None
    kept = {key: getattr(state, key) for key in _KEPT_AS_JSON}
    if state.prompt_ids is not None:
        kept |= {"prompt_ids": state.prompt_ids, "earlier": state.earlier}
    try:
        return orjson.dumps(kept, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return orjson.dumps(kept | {"meta": None})


def encode_sample(state: SampleState, head: bytes | None) -> tuple[bytes, bytes | None]:
    """Return the two blobs; `head` is what `state_json` made when the state was taken."""
    if state.packed is not None:
        kept: dict[str, Any] = {"attempt": state.attempt, "failures": state.failures, "turn": state.turn}
        if state.prompt_ids is not None:
            kept["prompt_ids"] = state.prompt_ids
        return orjson.dumps(kept), _tensors(record=state.packed)
    head = head or b"{}"
    try:
        return head, _encode_segments(state.segments) if state.segments else None
    except (TypeError, ValueError, OverflowError):  # an agent's own tokens may be anything: it begins again
        return head, None


def decode_sample(status: str, head: bytes, tokens: bytes | None) -> SampleState:
    """Put a sample together again.

    Raises:
        ValueError: these are no blobs of a sample (KeyError and safetensors' errors likewise).
    """
    kept = orjson.loads(head)
    tensors = load(tokens) if tokens is not None else {}
    if status == "COMPLETED":
        return _decode_completed(kept, tensors)
    kept |= {"earlier": tuple(kept.get("earlier", ()))}
    return SampleState(status=status, segments=_decode_segments(tensors) if tensors else (), **kept)


def _encode_segments(segments: Sequence[Segment]) -> bytes:
    table = [(len(segment.ids), segment.turn, int(segment.by_model)) for segment in segments]
    spans = [
        (index, span.start, span.end, span.version or 0, int(span.version is not None), int(span.confirmed))
        for index, segment in enumerate(segments)
        for span in segment.spans
    ]
    return _tensors(
        ids=_whole_numbers([token for segment in segments for token in segment.ids]),
        logprobs=array("d", [value for segment in segments for value in segment.logprobs]),
        segments=array("q", [number for row in table for number in row]),
        spans=array("q", [number for row in spans for number in row]),
    )


def _decode_segments(tensors: dict[str, _Array]) -> tuple[Segment, ...]:
    spans: dict[int, list[VersionSpan]] = {}
    for index, start, end, version, known, confirmed in tensors["spans"].reshape(-1, 6).tolist():
        spans.setdefault(index, []).append(VersionSpan(version if known else None, start, end, bool(confirmed)))
    segments: list[Segment] = []
    ids, logprobs, at = tensors["ids"].tolist(), tensors["logprobs"].tolist(), 0
    for index, (length, turn, by_model) in enumerate(tensors["segments"].reshape(-1, 3).tolist()):
        own = slice(at, at + length)
        segments.append(Segment(ids[own], logprobs[own], tuple(spans.get(index, ())), bool(by_model), turn))
        at += length
    return tuple(segments)


def _decode_completed(kept: dict[str, Any], tensors: dict[str, _Array]) -> SampleState:
    packed = tensors["record"].tobytes()
    record = orjson.loads(packed)
    return SampleState(
        status="COMPLETED",
        finish_reason=record["finish_reason"],
        engine_finish_reason=record["engine_finish_reason"],
        reward=record["reward"],
        reward_parts=record["reward_parts"] or None,
        packed=packed,
        length=len(record["response_ids"]),
        spans=spans_of(record),
        earlier_spans=tuple(map(spans_of, record.get("earlier_segments", ()))),
        meta=record["meta"],
        **kept,
    )


# -- prompts ---------------------------------------------------------------------------------------------------


def encode_prompt(prompt: Prompt) -> bytes:
    """A prompt without its ids and its task, JSON."""
    return orjson.dumps(
        {
            "content": prompt.content,
            "ground_truth": prompt.ground_truth,
            "meta": prompt.meta,
            "engine_extra": prompt.engine_extra,
        }
    )


def decode_prompt(prompt_id: str, task: str, record: bytes, ids: bytes) -> Prompt:
    """Put a prompt together again."""
    return Prompt(prompt_id=prompt_id, task=task, input_ids=decode_ids(ids), **orjson.loads(record))


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as one tensor, `ids`."""
    return _tensors(ids=_whole_numbers(ids))


def decode_ids(blob: bytes) -> list[int]:
    """Token ids again."""
    found: list[int] = load(blob)["ids"].tolist()
    return found


# -- numbers ---------------------------------------------------------------------------------------------------


def _tensors(**values: array[int] | array[float] | bytes) -> bytes:
    """Write vectors as safetensors, aligned; as `safetensors.numpy.save` does it, at a fifth of its cost."""
    header, at, parts = [], 0, []
    for name, vector in sorted(values.items(), key=lambda item: -_width(item[1])):  # widest first: each is aligned
        size = len(vector) * _width(vector)
        kind = "U8" if isinstance(vector, bytes) else _DTYPES[vector.typecode]
        header.append(f'"{name}":{{"dtype":"{kind}","shape":[{len(vector)}],"data_offsets":[{at},{at + size}]}}')
        parts.append(vector)
        at += size
    head = ("{" + ",".join(header) + "}").encode()
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def _width(vector: array[int] | array[float] | bytes) -> int:
    return 1 if isinstance(vector, bytes) else vector.itemsize


def _whole_numbers(values: Sequence[int]) -> array[int]:
    try:
        return array("i", values)
    except OverflowError:
        return array("q", values)
