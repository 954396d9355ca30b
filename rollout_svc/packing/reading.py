"""Tensors that were sent, read: a batch straight to torch, one sample's routed experts to NumPy.

Invariant: whatever bytes come, the result is a head and tensors, or a ServiceError.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import orjson

from rollout_svc.errors import ServiceError
from rollout_svc.packing.experts import EXPERTS, OFFSETS

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["experts_of", "read_batch", "read_experts"]

_LENGTH_BYTES: Final = 8  # of the header's length, before the header


def read_batch(body: bytes) -> dict[str, Any]:
    """Read a body of `POST /v1/batches` in safetensors.

    Returns:
        the head's keys (`batch_id`, `step`, `metrics`, `groups`, `samples`, where there is one `ack_expired`), and
        `tensors`, by name; dtypes and shapes as in `rollout_svc.packing.batch`.

    Raises:
        ServiceError: the body is no such batch.
    """
    tensors = _load(body)
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        header = orjson.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + size])
        record = orjson.loads(header["__metadata__"]["head"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the answer is no batch of tensors: its head is missing: {error!r}") from error
    if not isinstance(record, dict):
        raise ServiceError("the answer is no batch of tensors: its head is no object")
    return record | {"tensors": tensors}


def experts_of(batch: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Routed experts of what `read_batch` returned, by sample id, of those that have rows; views of its tensors.

    Returns:
        `(rows, layers, top_k)` each, uint8 or uint16.

    Raises:
        ServiceError: its offsets are none.
    """
    tensors = batch["tensors"]
    if EXPERTS not in tensors:
        return {}
    rows, offsets = tensors[EXPERTS].numpy(), tensors[OFFSETS].tolist()
    samples = [sample["sample_id"] for sample in batch["samples"]]
    if len(offsets) != len(samples) + 1 or offsets != sorted(offsets) or offsets[0] or offsets[-1] != len(rows):
        raise ServiceError("the answer is no batch of tensors: its routed experts do not fit its samples")
    spans = zip(samples, pairwise(offsets), strict=True)
    return {sample_id: rows[start:end] for sample_id, (start, end) in spans if end > start}


def read_experts(body: bytes) -> np.ndarray[Any, Any]:
    """Read a body of `GET /v1/tensors/{sample_id}`: `(rows, layers, top_k)`, uint8 or uint16.

    Raises:
        ServiceError: the body is no such tensor.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - only for who wants it
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        return load(body)[EXPERTS]
    except (SafetensorError, KeyError) as error:
        raise ServiceError(f"the answer has no routed experts: {error!r}") from error


def _load(body: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError  # noqa: PLC0415 - torch takes seconds to import: only for who wants it
    from safetensors.torch import load  # noqa: PLC0415

    try:
        return load(body)
    except SafetensorError as error:
        raise ServiceError(f"the answer is no batch of tensors: {error}") from error
