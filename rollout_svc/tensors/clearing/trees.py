"""Which shards a tree names: what a clear needs of it, and nothing else."""

from __future__ import annotations

from typing import Any

from rollout_svc.tensors.rtensor import RTensor
from rollout_svc.tensors.shards.names import Shard
from rollout_svc.tensors.tree import leaves

__all__ = ["flatten_shards"]


def flatten_shards(tree: Any) -> list[Shard]:
    """Return the shards of a tree, in its order, each id once."""
    found = (leaf.shard for leaf in leaves(tree, _is_remote) if isinstance(leaf, RTensor))
    return list({shard.id: shard for shard in found}.values())


def _is_remote(value: Any) -> bool:
    return isinstance(value, RTensor)
