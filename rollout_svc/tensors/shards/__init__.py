"""Shards: the bytes of remote tensors; who holds them, how they are fetched, where they are kept until drained."""

from rollout_svc.tensors.shards.buffer import BufferStats, Drained, FetchBuffer
from rollout_svc.tensors.shards.client import Client
from rollout_svc.tensors.shards.fetching import Fetcher
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.node import Node
from rollout_svc.tensors.shards.owner import Dropped, OwnerStats, ShardOwner
from rollout_svc.tensors.shards.plane import Plane, build_plane
from rollout_svc.tensors.shards.process import fetch_buffer, fetcher, install

__all__ = [
    "BufferStats",
    "Client",
    "Drained",
    "Dropped",
    "FetchBuffer",
    "Fetcher",
    "Meta",
    "Node",
    "OwnerStats",
    "Plane",
    "Shard",
    "ShardOwner",
    "build_plane",
    "fetch_buffer",
    "fetcher",
    "install",
]
