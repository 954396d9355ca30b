"""Going on with the batches that an earlier coordinator lent.

Invariants:

- What is whole is lent again, under its id. What is not was never lent, or is half consumed: it is given back, or
  consumed, which its other shards know.
- Where a shard does not answer nothing is decided: it is asked again once it has returned. Nobody else is held for it.
- One look at a time: shards return together, and a batch is lent once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_svc.errors import Conflict, NotFound, NotNow
from rollout_svc.sharding.batch import MergedBatch
from rollout_svc.sharding.figures import merge_figures
from rollout_svc.sharding.finding import Found
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members, answers
from rollout_svc.sharding.protocol import Leased

__all__ = ["Recalling"]


class Recalling:
    """See the module's invariants."""

    def __init__(
        self,
        members: Members,
        found: Found,
        *,
        lease_s: float,
        answer_s: float,
        pay: Callable[[Member], Coroutine[Any, Any, None]],
        recalled: Callable[[str, MergedBatch | None, str], None],
    ) -> None:
        """Make it.

        Args:
            members: the shards.
            found: what they have leased, and nobody here knows of.
            lease_s: seconds a batch is lent for.
            answer_s: seconds a shard has to answer.
            pay: has a shard do what it owes.
            recalled: is told of a batch that is lent again, or what became of it.
        """
        self._members = members
        self._found = found
        self._lease_s = lease_s
        self._answer_s = answer_s
        self._pay = pay
        self._recalled = recalled
        self._turn = asyncio.Lock()

    async def recall(self) -> None:
        """Decide what can be decided by now."""
        async with self._turn:
            for batch_id in tuple(self._found.parts):
                await self._recall(batch_id)

    async def _recall(self, batch_id: str) -> None:
        if self._verdict(batch_id) == "whole":
            await self._lend(batch_id)
        if self._verdict(batch_id) == "part":
            await self._finish(batch_id)

    def _verdict(self, batch_id: str) -> str | None:
        return self._found.verdict(batch_id) if batch_id in self._found.parts else None

    def _having(self, batch_id: str) -> list[Member]:
        return [member for member in self._members.all if member.shard_id in self._found.parts[batch_id]]

    async def _lend(self, batch_id: str) -> None:
        """Lend it as if it was lent now, if all of it is there still."""
        step, parts, members = self._found.step_of(batch_id), dict(self._found.parts[batch_id]), self._having(batch_id)
        until = asyncio.get_running_loop().time() + self._answer_s
        lives = {member.shard_id: member.shard.life for member in members}

        async def lease(member: Member) -> Leased:
            return await member.ask("lease", member.shard.lease(step, parts[member.shard_id][1], batch_id), until)

        outcomes = await self._members.fan(members, lease)
        leased = answers(outcomes)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, Conflict):  # its time was up there, since the shard said that it had it
                self._found.forget(batch_id, shard)
        if not self._found.parts.get(batch_id):
            self._recalled(batch_id, None, "expired")
        elif len(leased) == len(members):
            metrics = merge_figures([part.metrics for part in leased.values()], 0.0, 0.0)
            ends = asyncio.get_running_loop().time() + self._lease_s
            del self._found.parts[batch_id]
            self._recalled(batch_id, MergedBatch(batch_id, step, leased, lives, metrics, ends), "")

    async def fate(self, batch_id: str) -> str | None:
        """What became of a batch that no shard has leased, which they remember; None: there never was one.

        Raises:
            NotNow: who would know does not answer.
        """
        until = asyncio.get_running_loop().time() + self._answer_s
        told = await self._members.fan(
            self._members.all, lambda member: member.call("ack", {"batch_id": batch_id}, until)
        )
        if answers(told):
            return "acknowledged"
        if any(isinstance(outcome, Conflict) for outcome in told.values()):
            return "expired"
        silent = [shard for shard, outcome in told.items() if not isinstance(outcome, NotFound)]
        if silent:
            raise NotNow("not_enough", f"what became of batch {batch_id} is not known while {silent} do not answer")
        return None

    async def _finish(self, batch_id: str) -> None:
        """End what is there of it, or consume it where another part is consumed."""
        members = self._having(batch_id)
        until = asyncio.get_running_loop().time() + self._answer_s
        others = [member for member in self._members.all if member not in members]
        asked = await self._members.fan(others, lambda member: member.call("ack", {"batch_id": batch_id}, until))
        acked = bool(answers(asked))  # a part that is consumed: the ack was accepted, and cut short
        if not acked and not all(isinstance(outcome, Conflict | NotFound) for outcome in asked.values()):
            return
        for member in members:
            member.owed[batch_id] = "ack" if acked else "give_back"
        self._found.parts.pop(batch_id, None)
        self._recalled(batch_id, None, "acknowledged" if acked else "expired")
        await self._members.fan(members, self._pay)
