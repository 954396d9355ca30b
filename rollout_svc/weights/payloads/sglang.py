"""What SGLang's `POST /update_weights_from_tensor` is sent: buckets of bytes, of any dtypes, whole in every call.

Invariants:

- Tensors lie at multiples of 16 bytes, so that each can be viewed where it lies; SGLang's own flattening has no gaps,
  and what it packs it cannot always read.
- No call flushes the cache (it would fail after the weights have changed, where anything waits) or aborts anything.
- The version goes with the last bucket: before that no label says more than the weights do.
- Each bucket has a buffer of its own, to be kept until the answer: there is no event here that says when reading ended,
  and torch gives the memory back only once the engine has let go of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads.metadata import SGLangMetadata, metadata_of
from rollout_svc.weights.payloads.pickling import dumps

__all__ = ["begin", "end", "payload", "update_call"]

_SELECTOR: Final = "all"
"""Which models of an engine with a draft model take the update."""


def payload(bucket: FlattenedBucket) -> str:
    """Serialise a bucket for one rank.

    Raises:
        ValueError: it is not laid out in bytes, or empty.
    """
    if not bucket.metadata:
        raise ValueError("expected at least one tensor: SGLang refuses an empty bucket")
    body = {"flattened_tensor": bucket.buffer, "metadata": metadata_of(bucket, SGLangMetadata)}
    return dumps(body, SGLangMetadata.names(), by_uuid=True)


def update_call(payloads: Sequence[str], *, version: int | None = None) -> Call:
    """Build the call.

    Args:
        payloads: one for each tensor-parallel rank, in order.
        version: of the weights that are complete with this call; None: more follow.

    Raises:
        ValueError: there is no rank.
    """
    if not payloads:
        raise ValueError("expected a payload for each tensor-parallel rank, at least one")
    body = {
        "serialized_named_tensors": list(payloads),
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }
    if version is not None:
        body["weight_version"] = str(version)
    return Call("POST", "/update_weights_from_tensor", orjson.dumps(body), admin=True)


def begin() -> Call:
    """Open an update, which newer engines ask for; older ones do not know the route (404)."""
    return Call("POST", "/begin_weight_update", orjson.dumps({"selector": _SELECTOR}), admin=True)


def end() -> Call:
    """Close an update: this one, or one that its sender left open."""
    return Call("POST", "/end_weight_update", b"{}", admin=True)
