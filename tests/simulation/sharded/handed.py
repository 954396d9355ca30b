"""What was handed to trainers, by whom it was asked for, and what became of it.

Invariants checked here, with every batch that arrives:

- A batch has the groups it had when it was handed over before (P31); a group comes once in it (P1).
- A group comes in another batch only when the time of the batch it was in is up, and never once that was
  acknowledged, or its ack was accepted, however many coordinators die.
- Every sample is whole, judged, and within the bounds on its weights (P2 P6 P7 P13 P32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_svc.sharding.batch import groups_in
from tests.simulation.journal import check_record
from tests.simulation.sharded.host import Host

if TYPE_CHECKING:
    from tests.simulation.sharded.shape import ShardedShape
    from tests.simulation.world import World

__all__ = ["HandedOver"]


@dataclass
class _Batch:
    """One that arrived.

    Attributes:
        step: it was taken for.
        groups: their ids.
        ends: before that it cannot have ended by itself.
        acknowledged: its ack was answered.
        accepted: a lost shard is to consume its part when it returns.
    """

    step: int
    groups: tuple[str, ...]
    ends: float
    acknowledged: bool = False
    accepted: bool = False


class HandedOver:
    """The register."""

    def __init__(self, world: World, shape: ShardedShape, hosts: Sequence[Host]) -> None:
        self.batches: dict[str, _Batch] = {}
        self._world = world
        self._shape = shape
        self._hosts = hosts
        self._last: dict[str, str] = {}  # by group: the batch it came in last

    def arrived(self, batch: dict[str, Any], asked_at: float) -> None:
        """A batch was taken of a coordinator; it was asked for at a time, or lent before that."""
        world, require, batch_id = self._world, self._world.require, batch["batch_id"]
        ids = tuple(group["group_id"] for group in batch["groups"])
        require(len(set(ids)) == len(ids), "P1", f"batch {batch_id} has a group twice: {ids}")
        known = self.batches.get(batch_id)
        if known is None:
            require(len(ids) == groups_in(batch_id), "P2", f"batch {batch_id} has {len(ids)} groups")
            ends = asked_at + self._shape.config.buffer.lease_s
            known = self.batches[batch_id] = _Batch(batch["step"], ids, ends)
        require(known.groups == ids, "P31", f"batch {batch_id} had {known.groups}, it has {ids}")
        require(known.step == batch["step"], "P31", f"batch {batch_id} of {known.step} comes for {batch['step']}")
        require(not known.acknowledged, "P31", f"batch {batch_id} was acknowledged, and comes again")
        require(batch["metrics"]["groups"] == len(ids), "P2", f"batch {batch_id} says {batch['metrics']}")
        for group_id in ids:
            before = self._last.get(group_id, batch_id)
            if before != batch_id:
                earlier = self.batches[before]
                told = f"{group_id} of batch {before}, step {earlier.step}, comes in {batch_id}, step {batch['step']}"
                require(not earlier.acknowledged, "P31", f"{told}: it was acknowledged")
                require(not earlier.accepted, "P31", f"{told}: its ack was accepted")
                require(world.now >= earlier.ends, "P31", f"{told}: its lease lasts until {earlier.ends:.3f}")
            self._last[group_id] = batch_id
        self._check_samples(batch)
        world.say("trainer", "has", batch_id, batch["step"], *(group_id[-6:] for group_id in ids))

    def acknowledged(self, batch_id: str) -> None:
        """Its ack was answered: every shard has it consumed, for good."""
        self.batches[batch_id].acknowledged = True
        left = self._not_consumed(batch_id)
        self._world.require(not left, "P31", f"the ack of {batch_id} was answered, and {left} are not consumed")

    def accepted(self, batch_id: str) -> None:
        """Its ack is for good: what a lost shard has of it is consumed when that returns."""
        self.batches[batch_id].accepted = True

    def check_ended(self) -> None:
        """Everything is quiet: every ack that was accepted was carried out."""
        for batch_id, batch in self.batches.items():
            left = self._not_consumed(batch_id) if batch.accepted else None
            self._world.require(not left, "P31", f"the ack of {batch_id} was accepted, and {left} are not consumed")

    def _not_consumed(self, batch_id: str) -> set[str]:
        consumed = {group_id for host in self._hosts for group_id in host.world.durable.acknowledged_groups}
        return set(self.batches[batch_id].groups) - consumed

    def _check_samples(self, batch: dict[str, Any]) -> None:
        trainer, world, step = self._shape.config.trainer, self._world, batch["step"]
        masked = trainer.max_token_staleness
        oldest = None if masked is None else step - masked
        saved = {group_id: host for host in self._hosts for group_id in host.world.journal}
        for group in batch["groups"]:
            size = len(group["samples"])
            world.require(size == self._shape.group_size, "P2", f"{group['group_id']} came with {size} samples")
            world.require(group["group_id"] in saved, "P31", f"{group['group_id']} is leased, not durable")
            for sample in group["samples"]:
                check_record(world, sample, oldest)
                for span in sample["weight_versions"]:
                    fresh = span["version"] is not None and step - span["version"] <= trainer.max_staleness
                    world.require(fresh, "P32", f"{sample['sample_id']} has {span} at step {step}")
