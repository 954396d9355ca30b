"""RTensor: a remote tensor. What it looks like is everywhere, its bytes only where they are needed.

A producer stores the tensors of a tree with its node (`remotize`) and passes the tree on, some 200 bytes a tensor; a
consumer fetches those that it needs (`localize`), into the fetch buffer of its process. At step end a controller has
all of them drop and drain the tree's ids (`flatten_shard_ids`).

Invariants:

- An RTensor owns nothing: it may be copied, pickled, sent as JSON, and lost. What it names is its owner's, until it is
  dropped or its lease ends.
- A tree that is remotized is stored whole or not at all.
- The same tensor twice in a tree is stored once, and fetched once, and is one tensor there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.fetching import TIMEOUT_S, Fetcher
from rollout_svc.tensors.shards.leaves import is_tensor
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.process import fetcher as fetcher_of_process
from rollout_svc.tensors.tree import leaves, mapped

__all__ = ["Keeper", "RTensor", "flatten_shard_ids", "localize", "remotize"]

NAMED: Final = 3
"""Failures that an error of many tells in full."""


class Keeper(Protocol):
    """Where tensors are stored: a `Node`, a `ShardOwner`, an owner in Ray."""

    def put(self, tensor: Any) -> tuple[Shard, Meta]:
        """Keep a tensor."""

    def drop(self, ids: list[str]) -> Any:
        """Let go of tensors."""


@dataclass(frozen=True, slots=True)
class RTensor:
    """A remote tensor.

    Attributes:
        shard: where its bytes are.
        meta: what it looks like.
    """

    shard: Shard
    meta: Meta

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.meta.shape

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.meta.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.shard.nbytes

    def to_local(self, fetcher: Fetcher | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Fetch the tensor. Arguments and errors as `localize`."""
        return localize(self, fetcher, timeout_s=timeout_s)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**self.shard._asdict(), **self.meta._asdict()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RTensor:
        """Read it back.

        Raises:
            ShardFailure: `invalid`: it is not one.
        """
        try:
            shard = Shard(str(found["id"]), str(found["owner"]), int(found["nbytes"]))
            return cls(shard, Meta.of((found["shape"], found["dtype"], found["library"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ShardFailure("invalid", f"this is no remote tensor: {error!r}") from error


def remotize(tree: Any, node: Keeper) -> Any:
    """Store every tensor of a tree; return the tree with remote ones in their places.

    Args:
        tree: mappings, lists, deques, tuples, named tuples, sets, dataclasses; leaves that are no tensors, or remote,
            stay as they are, arrays of objects or strings among them.
        node: where they are stored; they are written to no more.

    Raises:
        ShardFailure: one could not be stored (`full`, `invalid`), and none is.
        ValueError: the tree contains itself, or is deeper than anything that means something; none is stored.
    """
    made: dict[int, RTensor] = {}

    def store(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        if (known := made.get(id(leaf))) is None:
            known = made[id(leaf)] = RTensor(*node.put(leaf))
        return known

    try:
        return mapped(tree, _is_leaf, store)
    except BaseException:
        node.drop([remote.shard.id for remote in made.values()])
        raise


def localize(
    tree: Any,
    fetcher: Fetcher | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    on_failure: Literal["raise", "place"] = "raise",
) -> Any:
    """Fetch every remote tensor of a tree; return the tree with tensors in their places.

    All owners are asked at once, each once for many shards; what the fetch buffer has is not asked for. Blocks: within
    an event loop, call it in a thread. What it returns may be written to, without any effect on what others get; an
    array of NumPy may not.

    Args:
        tree: as `remotize` returns it.
        fetcher: None: the one of this process.
        timeout_s: for all of it, in seconds.
        on_failure: `raise`, when all the others are there, so that a second call finds them; or `place`: a shard that
            could not be fetched has its `ShardFailure` in its place.

    Raises:
        ShardFailure: of the shards that could not be fetched: `missing`, `too_big`, `unreachable`, `unauthorized`,
            `timeout`, `invalid`.
    """
    wanted = {leaf.shard.id: leaf for leaf in leaves(tree, _is_leaf) if isinstance(leaf, RTensor)}
    if not wanted:
        return tree
    found = (fetcher or fetcher_of_process()).fetch(((one.shard, one.meta) for one in wanted.values()), timeout_s)
    failures = [outcome for outcome in found.values() if isinstance(outcome, ShardFailure)]
    if failures and on_failure == "raise":
        raise _joined(failures, len(wanted))
    return mapped(tree, _is_leaf, lambda leaf: found[leaf.shard.id] if isinstance(leaf, RTensor) else leaf)


def flatten_shard_ids(tree: Any) -> list[str]:
    """Return the ids of the shards of a tree, in its order, without duplicates: what drains and drops are told."""
    return list(dict.fromkeys(leaf.shard.id for leaf in leaves(tree, _is_leaf) if isinstance(leaf, RTensor)))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, RTensor)


def _joined(failures: list[ShardFailure], wanted: int) -> ShardFailure:
    if len(failures) == 1:
        return failures[0]
    told = "; ".join(str(failure) for failure in failures[:NAMED])
    more = f"; and {len(failures) - NAMED} more" if len(failures) > NAMED else ""
    ids = tuple(shard_id for failure in failures for shard_id in failure.ids)
    return ShardFailure(failures[0].reason, f"{len(failures)} of {wanted} shards: {told}{more}", ids)
