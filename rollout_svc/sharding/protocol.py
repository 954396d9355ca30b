"""What a coordinator asks of a shard, wherever that runs: in this process, or in an actor.

Invariants:

- A shard is a whole service with its share of workers, prompts and budget; it starts held, its gate closed, and opens
  when it is told to: by `pause`, whatever its gate is, and the `resume` after it.
- Every call ends: with its answer, with the error that the service raised, or with `ShardLost`.
- A shard that was lost and returned is the same shard in another life: what its journal has is there again, and it is
  held again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout_svc.errors import RolloutError
from rollout_svc.heavy import Heavy
from rollout_svc.packing.parts import Part

__all__ = ["Leased", "Shard", "ShardLost"]


class ShardLost(RolloutError):
    """Raised when a shard did not answer because it died, or cannot be reached; it may return."""


class Leased(Protocol):
    """Groups that a shard has leased for a batch of the coordinator's."""

    @property
    def count(self) -> int:
        """How many groups."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The figures of a batch of these groups alone, as `batch_figures` writes them."""

    async def records(self) -> Sequence[bytes]:
        """The groups' encoded records, in order; asked for when somebody wants them, for they are large.

        Raises:
            ShardLost: they went with the shard; it has them again, under the same id, in its next life.
        """

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        """Routed experts by sample id, of those that have some: where they lie, to be read until the lease ends.

        Args:
            sample_id: of this sample alone; nothing where it is in another part.

        Raises:
            Conflict: the lease has ended.
            NotFound: `no_experts`: that sample has none.
            NotNow: there is no room where they would be read.
            ShardLost: see `records`.
        """

    async def part(self) -> Part:
        """What is to be packed of the groups; raises as `experts` does."""


class Shard(Protocol):
    """One shard; the calls that have the names of the service's are the service's."""

    @property
    def shard_id(self) -> str:
        """Its name: `s0`, `s1`, …."""

    @property
    def life(self) -> int:
        """How often it was started: another number means that it was lost in between."""

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        """Say how many groups may be handed over at `step`; waits until they are `wanted`, or the time is up.

        While somebody waits here the shard's schedule takes it that `wanted` groups are asked for at `step`. Without
        time to wait nothing is asked for, and nothing raised: it is only looked at what is there.

        Raises:
            NotNow: `wanted` can never be, or the shard has failed; `detail` has `ready` and `can_be_met: false`.
        """

    async def lease(self, step: int, at_most: int, batch_id: str) -> Leased:
        """Lease what is ready, up to so many groups, under an id of the coordinator's; the same id again: the same."""

    async def give_back(self, batch_id: str) -> None:
        """End a lease as if its time had passed; nothing where there is none."""

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """Make one of the service's calls (`status`, `pause`, `resume`, `ack`, `update_weights`, …).

        The answer is the record that the control API gives, as values: `pause` answers with the report's `as_json`,
        `workers` with the list, `evaluate` with `{"groups": […]}`.
        """
