"""Names that hold over all shards: `w1` of shard `s0` is `s0.w1`. Pure.

Invariant: a name that was joined is taken apart into what it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rollout_svc.errors import NotFound

__all__ = ["joined", "named", "split", "worker_record"]

T = TypeVar("T")


def joined(shard_id: str, name: str) -> str:
    """The name of a shard's worker beyond the shard."""
    return f"{shard_id}.{name}"


def named(shard_id: str, records: Mapping[str, T]) -> dict[str, T]:
    """The same records under names that hold over all shards."""
    return {joined(shard_id, name): record for name, record in records.items()}


def split(name: str) -> tuple[str, str]:
    """Take a name apart; raises NotFound where it is none of ours."""
    shard_id, dot, rest = name.partition(".")
    if not dot or not rest:
        raise NotFound(f"no worker {name!r}: a worker of a shard is called like s0.w1")
    return shard_id, rest


def worker_record(shard_id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's record under its name beyond the shard."""
    return {**record, "id": joined(shard_id, record["id"])}
