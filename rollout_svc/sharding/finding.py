"""Batches that an earlier coordinator lent, found in the shards that have them. Pure.

Invariant: a batch is whole when its parts have as many groups as its id says; that it is not is known only when every
shard has said what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rollout_svc.sharding.batch import groups_in

__all__ = ["Found"]


class Found:
    """What shards have leased, and nobody here knows of.

    Attributes:
        parts: by batch and shard: the step, and how many groups.
    """

    def __init__(self, shards: Iterable[str], lent: Mapping[str, int]) -> None:
        """Begin.

        Args:
            shards: all of them; none has said anything yet.
            lent: by batch, the step for which an earlier coordinator lent it, as far as that is known.
        """
        self.parts: dict[str, dict[str, tuple[int, int]]] = {}
        self._unseen = set(shards)
        self._lent = dict(lent)

    def see(self, shard: str, leases: Iterable[Mapping[str, Any]], known: Iterable[str]) -> None:
        """A shard said what it has leased; batches that are known here are left alone."""
        self._unseen.discard(shard)
        for parts in self.parts.values():
            parts.pop(shard, None)
        skipped = set(known)
        for lease in leases:
            if lease["batch_id"] not in skipped and groups_in(lease["batch_id"]) is not None:
                self.parts.setdefault(lease["batch_id"], {})[shard] = lease["step"], lease["groups"]
        self.parts = {batch_id: parts for batch_id, parts in self.parts.items() if parts}

    def may_have(self, batch_id: str) -> bool:
        """Whether it is not known yet what became of a batch."""
        return bool(self._unseen) or batch_id in self.parts

    def forget(self, batch_id: str, shard: str) -> None:
        """A shard has its part no more."""
        if batch_id in self.parts:
            self.parts[batch_id].pop(shard, None)
            if not self.parts[batch_id]:
                del self.parts[batch_id]

    @property
    def unseen(self) -> tuple[str, ...]:
        """Shards that have not said what they have."""
        return tuple(sorted(self._unseen))

    def settle(self, batch_id: str) -> None:
        """It is known what became of a batch."""
        self._lent.pop(batch_id, None)

    def absent(self) -> list[str]:
        """Take those that were lent, and that no shard has: all have said so."""
        if self._unseen:
            return []
        gone = [batch_id for batch_id in self._lent if batch_id not in self.parts]
        for batch_id in gone:
            del self._lent[batch_id]
        return gone

    def verdict(self, batch_id: str) -> Literal["whole", "part", "unknown"]:
        """What is there of a batch."""
        if sum(groups for _, groups in self.parts[batch_id].values()) == groups_in(batch_id):
            return "whole"
        return "unknown" if self._unseen else "part"

    def step_of(self, batch_id: str) -> int:
        """The step it was lent for."""
        return next(step for step, _ in self.parts[batch_id].values())

    @property
    def steps(self) -> frozenset[int]:
        """Steps whose batch may be one of these, or in a shard that has not spoken yet."""
        return frozenset({*(self.step_of(batch_id) for batch_id in self.parts), *self._lent.values()})
