"""A shard in this process: what a coordinator asks, asked of a service.

Invariants:

- What is asked of the service here is what its control API can be asked, and answered with the same records.
- It was started once: where this process lives, so does the shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_svc.batch import Batch
from rollout_svc.config import WorkerConfig
from rollout_svc.errors import BadRequest, NotFound
from rollout_svc.heavy import Heavy
from rollout_svc.packing.parts import Part, part_of
from rollout_svc.pause.report import PauseReport
from rollout_svc.service import RolloutService
from rollout_svc.sharding.split import ShardSettings

__all__ = ["LocalLease", "LocalShard", "answer", "experts_of", "lease", "ready_groups", "records"]

_CALLS: Final = frozenset(
    {
        *("status", "stuck", "memory", "pause", "resume", "ack", "put_prompts", "evaluate", "checkpoint"),
        *("update_weights", "concurrency", "set_concurrency", "workers", "add_worker", "remove_worker", "ready"),
    }
)


async def answer(service: RolloutService, name: str, given: Mapping[str, Any]) -> Any:
    """Make one of the service's calls; returns its record as values.

    Raises:
        BadRequest: it has no such call.
    """
    if name not in _CALLS:
        raise BadRequest(f"a shard has no call {name!r}")
    arguments = dict(given)
    if name == "add_worker" and not isinstance(arguments["config"], WorkerConfig):
        arguments["config"] = WorkerConfig.model_validate(arguments["config"])
    answered = getattr(service, name)(**arguments)
    if inspect.isawaitable(answered):
        answered = await answered
    return answered.as_json() if isinstance(answered, PauseReport) else answered


async def ready_groups(service: RolloutService, step: int, wanted: int, timeout_s: float) -> int:
    """Say how many groups may be handed over; see `Batches.ready_groups`."""
    service.check_alive("failed")
    return await service.parts.batches.ready_groups(step, wanted, timeout_s)


async def lease(service: RolloutService, step: int, at_most: int, batch_id: str) -> Batch | None:
    """Lease what is ready; see `Batches.lease`."""
    service.check_alive("failed")
    return await service.parts.batches.lease(step, at_most, batch_id)


def records(service: RolloutService, batch_id: str) -> list[bytes]:
    """The records of what is leased under an id.

    Raises:
        Conflict: nothing is, any more: whoever reads late is not to lease what another batch will have.
    """
    return list(service.parts.batches.lent(batch_id).records())


def experts_of(batch: Batch, sample_id: str | None) -> dict[str, Heavy]:
    """Routed experts of a batch that is lent; see `Leased.experts`."""
    samples = [sample for group in batch.groups for sample in group.samples if sample_id in (None, sample.sample_id)]
    found = {sample.sample_id: sample.experts for sample in samples if sample.experts is not None}
    if sample_id is not None and samples and not found:
        raise NotFound(f"sample {sample_id} has no routed experts", type="no_experts")
    return found


class LocalLease:
    """Groups that a shard of this process has leased.

    Attributes:
        batch: they; None: there are none.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch

    def __repr__(self) -> str:
        return f"<LocalLease of {self.count}>"

    @property
    def count(self) -> int:
        """How many groups."""
        return 0 if self.batch is None else len(self.batch.groups)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Their figures; none where there are no groups."""
        return {} if self.batch is None else self.batch.metrics

    async def records(self) -> Sequence[bytes]:
        """The groups' records."""
        return [] if self.batch is None else list(self.batch.records())

    async def experts(self, sample_id: str | None = None) -> Mapping[str, Heavy]:
        """Routed experts, the shard's own."""
        return {} if self.batch is None else experts_of(self.batch, sample_id)

    async def part(self) -> Part:
        """What is to be packed."""
        return Part([], b"", b"") if self.batch is None else part_of(self.batch)


class LocalShard:
    """One shard in this process, behind the protocol.

    Attributes:
        service: it; whoever made it starts and stops it.
        life: it has one.
    """

    life: Final = 1

    def __init__(self, shard_id: str, service: RolloutService) -> None:
        self.shard_id = shard_id
        self.service = service

    def __repr__(self) -> str:
        return f"<LocalShard {self.shard_id} {self.service.state}>"

    @classmethod
    def of(cls, settings: ShardSettings, **outside: Any) -> LocalShard:
        """Make the shard and its service, not started.

        Args:
            settings: its part of the whole.
            outside: what else `RolloutService` takes.
        """
        return cls(settings.shard_id, RolloutService(settings.config, portion=settings.portion, **outside))

    async def ready_groups(self, step: int, wanted: int, timeout_s: float) -> int:
        """See `Shard.ready_groups`."""
        return await ready_groups(self.service, step, wanted, timeout_s)

    async def lease(self, step: int, at_most: int, batch_id: str) -> LocalLease:
        """See `Shard.lease`."""
        return LocalLease(await lease(self.service, step, at_most, batch_id))

    async def give_back(self, batch_id: str) -> None:
        """See `Shard.give_back`."""
        await self.service.parts.batches.give_back(batch_id)

    async def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """See `Shard.call`."""
        return await answer(self.service, name, given)
