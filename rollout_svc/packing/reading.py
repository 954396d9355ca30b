"""A batch of tensors, read: straight to torch.

Invariant: whatever bytes come, the result is a head and tensors, or a ServiceError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from rollout_svc.errors import ServiceError

if TYPE_CHECKING:
    import torch

__all__ = ["read_batch"]

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


def _load(body: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError  # noqa: PLC0415 - torch takes seconds to import: only for who wants it
    from safetensors.torch import load  # noqa: PLC0415

    try:
        return load(body)
    except SafetensorError as error:
        raise ServiceError(f"the answer is no batch of tensors: {error}") from error
