"""What the tensors of this process come to, by account: for whoever watches its memory.

Invariant: sums that their owners keep themselves; asking costs microseconds, and makes nothing.
"""

from __future__ import annotations

from collections import Counter

from rollout_svc.tensors.handle import Handles
from rollout_svc.tensors.shards.process import fetched_bytes

__all__ = ["tensor_bytes"]


def tensor_bytes(*held: Handles) -> dict[str, int]:
    """Return bytes by account: `fetch_buffers` where something was ever fetched here, and `handles.<kind>`.

    Args:
        held: the handles of this process's owners (`node.owner.handles`).
    """
    found: Counter[str] = Counter()
    for handles in held:
        for kind, tally in handles.live.items():
            found[f"handles.{kind}"] += tally.bytes
    fetched = fetched_bytes()
    return dict(found) if fetched is None else {**found, "fetch_buffers": fetched}
