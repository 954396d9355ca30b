"""The engines of all shards, and the plan they follow.

Invariant: who is not in step is told with what it said last; its workers are in no traffic, whatever it said then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from rollout_svc.config import Config, TrainerConfig, WorkerConfig
from rollout_svc.configfile import problems_of
from rollout_svc.errors import BadRequest, NotFound, NotNow
from rollout_svc.sharding.dealing import all_or_raise
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members, answers
from rollout_svc.sharding.naming import split, worker_record
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.records import merge_memory, merge_plans, merge_stuck
from rollout_svc.sharding.split import shard_trainers

__all__ = ["FannedFleet", "Trainer", "divide_trainer", "seen"]

_ANSWER_S: Final = 5.0  # seconds a shard has for an answer that nothing is waited for

Trainer = Mapping[str, Any]


def divide_trainer(config: Config, trainer: Trainer, weights: Mapping[str, int]) -> dict[str, Trainer]:
    """What each shard is told where the trainer's numbers change; see `split.shard_trainers`.

    Args:
        config: the settings of the whole.
        trainer: what changed.
        weights: how much each shard can do.

    Raises:
        BadRequest: a value is out of bounds, or a shard would have nothing to make.
    """
    try:
        whole = TrainerConfig.model_validate(config.trainer.model_dump() | dict(trainer))
    except ValidationError as error:
        listed = [{"path": problem.path, "message": problem.message} for problem in problems_of(error, "trainer")]
        raise BadRequest("; ".join(f"{p['path']}: {p['message']}" for p in listed), detail=listed) from error
    if whole.train_batch_size < len(weights):
        raise BadRequest.at("trainer.train_batch_size", f"expected a group for each of {len(weights)} shards")
    parts = shard_trainers(whole, list(weights.values()))
    own = ("train_batch_size", "over_sample_threshold")
    told = [{**trainer, **{name: getattr(part, name) for name in own}} for part in parts]
    return dict(zip(weights, told, strict=True))


class FannedFleet:
    """Workers and plans; see the module's invariant."""

    def __init__(
        self,
        members: Members,
        config: Config,
        divide: Callable[[Config, Trainer, Mapping[str, int]], Mapping[str, Trainer]],
    ) -> None:
        self.members = members
        self.config = config
        self._divide = divide

    async def refresh(self, members: Iterable[Member]) -> None:
        """Ask those in step how they stand."""
        until = _now() + _ANSWER_S

        async def look(member: Member) -> None:
            member.hear(await member.call("status", {}, until))

        await self.members.fan([member for member in members if member.inside], look)

    async def workers(self) -> list[dict[str, Any]]:
        """Every worker's record."""
        await self.refresh(self.members.all)
        heard = [member for member in self.members.all if member.known is not None]
        return [worker_record(m.shard_id, worker) for m in heard for worker in seen(m)["workers"]]

    async def stuck(self, older_than_s: float | None = None) -> dict[str, Any]:
        """Who has been under way for longer than that, and where."""
        return merge_stuck(await self._told("stuck", {"older_than_s": older_than_s}))

    async def memory(self) -> dict[str, Any]:
        """What every process has; see `RolloutService.memory`."""
        return merge_memory(await self._told("memory", {}))

    async def concurrency(self) -> dict[str, Any]:
        """The plan in force."""
        return merge_plans(await self._told("concurrency", {}))

    async def _told(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        until = _now() + _ANSWER_S
        told = answers(await self.members.fan(self.members.inside, lambda member: member.call(name, given, until)))
        if not told:
            raise NotNow("starting", "no shard answers")
        return told

    async def set_concurrency(self, trainer: Trainer, limits: Mapping[str, int]) -> dict[str, Any]:
        """Follow other numbers of the trainer's, each shard its part, or set workers' limits by hand."""
        weights = {m.shard_id: ((m.known or {}).get("plan") or {}).get("workers", 1) for m in self.members.all}
        parts = self._divide(self.config, trainer, weights) if trainer else {}
        caps: dict[str, dict[str, int]] = {}
        for name, limit in limits.items():
            shard, own = split(name)
            caps.setdefault(self._member(shard).shard_id, {})[own] = limit
        until = _now() + _ANSWER_S

        async def follow(member: Member) -> dict[str, Any]:
            given = {"trainer": dict(parts.get(member.shard_id, {})), "limits": caps.get(member.shard_id, {})}
            plan: dict[str, Any] = await member.call("set_concurrency", given, until)
            return plan

        plans = all_or_raise(await self.members.fan(self.members.all, follow), "plan")
        merged = self.config.trainer.model_dump() | dict(trainer)
        self.config = self.config.model_copy(update={"trainer": TrainerConfig.model_validate(merged)})
        return merge_plans(dict(zip(self.members.by_id, plans, strict=True)))

    async def add_worker(self, config: WorkerConfig) -> dict[str, Any]:
        """Add an engine to the shard in step that has the fewest."""
        inside = self.members.inside
        if not inside:
            raise NotNow("starting", "no shard is in step")
        member = min(inside, key=lambda member: len((member.known or {}).get("workers", [])))
        added = member.call("add_worker", {"config": config}, _now() + self.config.pause.deadline_s)
        record = worker_record(member.shard_id, await _said(added))
        await self.refresh([member])
        return record

    async def remove_worker(self, worker_id: str) -> dict[str, Any]:
        """Take an engine out of its shard; what it runs may finish first."""
        shard, name = split(worker_id)
        member = self._member(shard)
        record = await _said(member.call("remove_worker", {"worker_id": name}, _now() + _ANSWER_S))
        return {**record, "id": worker_id}

    def _member(self, shard_id: str) -> Member:
        member = self.members.by_id.get(shard_id)
        if member is None:
            raise NotFound(f"no shard {shard_id!r}", detail={"shards": list(self.members.by_id)})
        return member


def seen(member: Member) -> dict[str, Any]:
    """A shard's last status; workers of one that is held are in no traffic, whatever it said then."""
    known = dict(member.known or {})
    if not member.inside:
        told = {"state": "QUARANTINED", "reason": f"its shard is held: {member.why}"}
        known["workers"] = [{**worker, **told} for worker in known["workers"]]
    return known


async def _said(call: Awaitable[Any]) -> Any:
    """Wait for one shard's answer; that it is lost is said as what a caller may ask again."""
    try:
        return await call
    except ShardLost as lost:
        raise NotNow("starting", str(lost)) from lost


def _now() -> float:
    return asyncio.get_running_loop().time()
