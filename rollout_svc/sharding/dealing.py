"""Work that is dealt out: prompts that are pushed, evaluations, checkpoints.

Invariants:

- A prompt that is pushed goes to its home, whoever is alive: the same id is accepted once, after a loss as well.
- All prompts are looked at before any is sent: one that is wrong is refused with all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_svc.config import Config
from rollout_svc.errors import BadRequest, NotNow, RolloutError
from rollout_svc.producer.lines import read_line
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.shares import home_of

__all__ = ["Dealing", "all_or_raise"]

_GRACE_S: Final = 5.0  # seconds a shard may take longer to answer than it was given for its work


class Dealing:
    """Deals out; see the module's invariants."""

    def __init__(self, members: Members, config: Config) -> None:
        self.members = members
        self.config = config

    async def put_prompts(self, task: str, prompts: list[Any]) -> dict[str, int]:
        """Add prompts to a task that is fed by push: each to its home, so that the same id is accepted once.

        Raises:
            NotNow: a home is lost; what went to the others is there, and pushing all of it again adds the rest.
        """
        homes: dict[str, list[Any]] = {}
        shards = self.members.all
        for index, prompt in enumerate(prompts):
            line = read_line(prompt, {}, f"prompts.{index}")
            if line.problem is not None:
                raise BadRequest(line.problem, detail=[{"path": f"prompts.{index}", "message": line.problem}])
            homes.setdefault(shards[home_of(task, line.prompt_id, len(shards))].shard_id, []).append(prompt)
        if not prompts:  # nothing to add, and a task to be found wrong
            homes[shards[0].shard_id] = []

        async def push(member: Member) -> int:
            given = {"task": task, "prompts": homes[member.shard_id]}
            accepted = await member.call("put_prompts", given, _now() + self.config.pause.deadline_s)
            return int(accepted["accepted"])

        outcomes = await self.members.fan([m for m in shards if m.shard_id in homes], push)
        return {"accepted": sum(all_or_raise(outcomes, "prompts"))}

    async def evaluate(
        self,
        task: str,
        prompts: Sequence[Any],
        how: Mapping[str, Any],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Have prompts answered and judged in lane `eval`, dealt out to the shards; in the order of the prompts."""
        until = _now() + timeout_s
        inside = self.members.inside
        if not inside:
            raise NotNow("starting", "no shard is in step")
        dealt = {member.shard_id: list(range(n, len(prompts), len(inside))) for n, member in enumerate(inside)}

        async def answered(member: Member) -> list[Any]:
            given = {
                "task": task,
                "prompts": [prompts[index] for index in dealt[member.shard_id]],
                **how,
                "timeout_s": max(1e-3, until - _now()),
            }
            return list((await member.call("evaluate", given, until + _GRACE_S))["groups"])

        asked = [member for member in inside if dealt[member.shard_id]] or list(inside[:1])
        parts = all_or_raise(await self.members.fan(asked, answered), "evaluation")
        records: dict[int, Any] = {}
        for member, groups in zip(asked, parts, strict=True):
            records |= dict(zip(dealt[member.shard_id], groups, strict=True))
        return {"groups": [records[index] for index in sorted(records)]}

    async def checkpoint(self, path: str, step: int) -> dict[str, Any]:
        """Write a snapshot of each shard, at `path` with its name behind it; one that is lost fails it."""
        until = _now() + self.config.request_timeout_s

        async def write(member: Member) -> dict[str, Any]:
            given = {"path": f"{path}.{member.shard_id}", "step": step}
            record: dict[str, Any] = await member.call("checkpoint", given, until)
            return record

        records = all_or_raise(await self.members.fan(self.members.all, write), "checkpoint")
        return {**records[0], "path": path}


def all_or_raise(outcomes: Mapping[str, Any], what: str) -> list[Any]:
    """Every shard's answer, in their order; the first error of one, and that one is lost last."""
    errors = {shard: outcome for shard, outcome in outcomes.items() if isinstance(outcome, RolloutError)}
    for error in errors.values():
        if not isinstance(error, ShardLost):
            raise error
    if errors:
        raise NotNow("starting", f"{what}: {'; '.join(map(str, errors.values()))}", detail={"shards": list(errors)})
    return list(outcomes.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
