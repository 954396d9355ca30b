"""What SGLang's `POST /update_weights_from_tensor` is sent: buckets of bytes, of any dtypes, whole in every call.

Invariants:

- Tensors lie at multiples of 16 bytes, so that each can be viewed where it lies; SGLang's own flattening has no gaps,
  and what it packs it cannot always read.
- No call flushes the cache (it would fail after the weights have changed, where anything waits) or aborts anything.
- Each bucket has a buffer of its own, to be kept until the answer: there is no event here that says when reading ended,
  and torch gives the memory back only once the engine has let go of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads.metadata import SGLangMetadata, metadata_of
from rollout_svc.weights.payloads.pickling import dumps

__all__ = ["body", "payload"]


def payload(bucket: FlattenedBucket) -> str:
    """Serialise a bucket for one rank.

    Raises:
        ValueError: it is not laid out in bytes, or empty.
    """
    if not bucket.metadata:
        raise ValueError("expected at least one tensor: SGLang refuses an empty bucket")
    parts = {"flattened_tensor": bucket.buffer, "metadata": metadata_of(bucket, SGLangMetadata)}
    return dumps(parts, SGLangMetadata.names(), by_uuid=True)


def body(payloads: Sequence[str]) -> dict[str, Any]:
    """Make the body of the call.

    Args:
        payloads: one for each tensor-parallel rank, in order.

    Raises:
        ValueError: there is no rank.
    """
    if not payloads:
        raise ValueError("expected a payload for each tensor-parallel rank, at least one")
    return {
        "serialized_named_tensors": list(payloads),
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }
