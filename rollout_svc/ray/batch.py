"""A batch on its way to a consumer: records as bytes, heavy tensors as references.

Invariants:

- Records are decoded where they arrive, not in the service: what it sends was encoded when each group was done.
- A reference leaves the service inside what Ray serialises, and in no other way: Ray counts it then, and the object
  lives for as long as the consumer holds it.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollout_svc.batch import Batch

__all__ = ["Packed", "TakenBatch", "last_taken", "pack"]

_LAST: dict[str, str] = {}
"""The batch that each client of this process got last."""


class TakenBatch(dict[str, Any]):
    """The record of a batch, as the control API answers it, with its heavy tensors beside it."""


class Packed:
    """A batch as it travels; who receives it gets a `TakenBatch`."""

    __slots__ = ("_client", "_pieces")

    def __init__(self, pieces: list[bytes], client: str | None) -> None:
        self._pieces = pieces
        self._client = client

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._pieces, self._client)


def pack(batch: Batch, client: str | None) -> Packed:
    """Make what travels of a leased batch."""
    return Packed(list(batch.encoded()), client)


def last_taken(client: str) -> str | None:
    """The id of the batch that a client received last in this process."""
    return _LAST.get(client)


def _unpack(pieces: list[bytes], client: str | None) -> TakenBatch:
    batch = TakenBatch(orjson.loads(b"".join(pieces)))
    if client is not None:
        _LAST[client] = batch["batch_id"]
    return batch
