"""Batches over all shards: taken, acknowledged, given back, as a whole or not at all.

Invariants:

- A batch is lent when every part of it is leased; what cannot be completed is given back, also by a shard that was lost
  before it could say what it leased: it owes that, and pays before it opens.
- The lease of the whole ends before that of any part, in one step, so that no part is consumed of a batch that expired.
- An ack is for good once it was accepted: a shard that is lost meanwhile consumes its part when it returns.
- A batch of which a part is gone, with a shard that keeps no journal, is ended everywhere.
- Leases outlive the coordinator: another finds them in the shards, and what is not whole is ended, or, where a part was
  consumed, acknowledged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from rollout_svc.errors import BadRequest, Conflict, NotFound, NotNow, NotNowType, RolloutError
from rollout_svc.sharding.batch import MergedBatch, groups_in, with_groups
from rollout_svc.sharding.figures import merge_figures
from rollout_svc.sharding.finding import Found
from rollout_svc.sharding.gathering import Gathering
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members, answers
from rollout_svc.sharding.protocol import Leased, ShardLost
from rollout_svc.sharding.shares import share_out
from rollout_svc.tasks import TaskOwner

__all__ = ["FannedBatches"]

_REMEMBERED: Final = 1024  # ended batches whose fate is still told to a late ack


class FannedBatches:
    """Takes, leases and acks; see the module's invariants."""

    def __init__(
        self,
        members: Members,
        tasks: TaskOwner,
        *,
        lease_s: float,
        answer_s: float,
        new_id: Callable[[], str],
        paused_s: Callable[[], float],
        paused: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        """Make them.

        Args:
            members: the shards.
            tasks: who carries a lease, and an ack.
            lease_s: seconds a batch is lent for.
            answer_s: seconds a shard has to lease its part, or to consume it.
            new_id: gives unique ids.
            paused_s: seconds for which the stage was paused, ever.
            paused: whether it is.
            check: raises where the service has failed, or stops.
        """
        self._members = members
        self._tasks = tasks
        self._lease_s = lease_s
        self._answer_s = answer_s
        self._new_id = new_id
        self._paused_s = paused_s
        self._paused = paused
        self._check = check
        self._last_paused_s = 0.0
        self._leased: dict[str, MergedBatch] = {}
        self._fates: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._found = Found(members.by_id)
        self._lending: set[str] = set()
        self._gathering: Gathering | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def leases(self) -> list[dict[str, Any]]:
        """What is lent, as status says it."""
        return [
            {"batch_id": batch.batch_id, "step": batch.step, "groups": groups_in(batch.batch_id) or 0}
            for batch in self._leased.values()
        ]

    def wake(self) -> None:
        """Something changed: whoever waits looks again."""
        if self._gathering is not None:
            self._gathering.wake.set()

    async def take(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> MergedBatch:
        """Lease a batch; the same step again gives the same batch while it is leased. See `Batches.take`."""
        _check(step, groups, timeout_s)
        loop = asyncio.get_running_loop()
        started = loop.time()
        until = started + timeout_s
        expired = await self._acknowledge_all(ack)
        while True:
            if (again := self._at(step)) is not None:
                return replace(await self._whole(again, until), ack_expired=expired)
            gathering: Gathering | None = None
            try:
                async with asyncio.timeout_at(until), self._turn:
                    self._check()
                    if self._at(step) is not None:
                        continue
                    gathering = self._gathering = Gathering(self._members, self._tasks, step, groups, until)
                    await self._wait(gathering, step, groups)
                    if self._at(step) is not None:
                        continue
                    lending = self._tasks.spawn(
                        "lend", self._lend(step, groups, gathering.ready, started), handled=True
                    )
                batch: MergedBatch | None = await asyncio.shield(lending)
            except TimeoutError:
                raise self._shortage(gathering, groups) from None
            finally:
                if gathering is not None:
                    gathering.end()
            if batch is not None:
                return replace(batch, ack_expired=expired)

    async def _wait(self, gathering: Gathering, step: int, groups: int) -> None:
        while not gathering.enough or step in self._found.steps:
            self._check()
            if gathering.hopeless and not gathering.enough:
                raise self._shortage(gathering, groups)
            gathering.wake.clear()
            gathering.begin()
            await gathering.wake.wait()

    def _at(self, step: int) -> MergedBatch | None:
        return next((batch for batch in self._leased.values() if batch.step == step and not batch.acking), None)

    async def _whole(self, batch: MergedBatch, until: float) -> MergedBatch:
        """Lease again what a shard has in another life: its journal has it, under the same id."""
        for shard, life in tuple(batch.lives.items()):
            member = self._members.by_id[shard]
            if member.shard.life != life and shard not in batch.acked:
                count = batch.parts[shard].count
                asked = member.shard.lease(batch.step, count, batch.batch_id)
                now = member.shard.life
                batch.parts[shard] = await self._say(member, member.ask("lease", asked, until))
                batch.lives[shard] = now
        return batch

    async def _say(self, member: Member, answer: Any) -> Any:
        """Wait for a shard's answer; that it is lost is said as what a caller may ask again."""
        try:
            return await answer
        except RolloutError as error:
            raise NotNow("not_enough", f"a part of the batch is in shard {member.shard_id}: {error}") from error

    async def _lend(self, step: int, groups: int, ready: dict[str, int], started: float) -> MergedBatch | None:
        """Lease from each shard its part; None: something went between, and nothing is lent."""
        loop = asyncio.get_running_loop()
        parts = {shard: number for shard, number in share_out(groups, ready).items() if number}
        batch_id, ends = with_groups(self._new_id(), groups), loop.time() + self._lease_s
        lives = {shard: self._members.by_id[shard].shard.life for shard in parts}

        async def lease(member: Member) -> Leased:
            member.check_life()
            asked = member.shard.lease(step, parts[member.shard_id], batch_id)
            leased = await member.ask("lease", asked, loop.time() + self._answer_s)
            member.check_life()
            return leased

        self._lending.add(batch_id)
        asked = [member for member in self._members.all if member.shard_id in parts]
        outcomes = answers(await self._members.fan(asked, lease))
        leased = {shard: part for shard, part in outcomes.items() if part.count}
        self._lending.discard(batch_id)
        if sum(part.count for part in leased.values()) != groups:
            self._fates[batch_id] = "expired"
            await self._give_back(batch_id, asked)
            return None
        paused_s = self._paused_s()
        pause_s, self._last_paused_s = paused_s - self._last_paused_s, paused_s
        metrics = merge_figures([part.metrics for part in leased.values()], loop.time() - started, pause_s)
        batch = self._leased[batch_id] = MergedBatch(batch_id, step, leased, lives, metrics, ends)
        self._set_timer()
        return batch

    async def _give_back(self, batch_id: str, members: Iterable[Member]) -> None:
        """End the lease in these shards; who cannot be told now is told when it returns."""
        asked = list(members)
        for member in asked:
            member.owed[batch_id] = "give_back"
        await self._members.fan(asked, self.pay)

    async def pay(self, member: Member) -> None:
        """Have a shard do what it has not been told yet."""
        for batch_id, what in tuple(member.owed.items()):
            until = asyncio.get_running_loop().time() + self._answer_s
            if what == "give_back":
                await member.ask("give_back", member.shard.give_back(batch_id), until)
            else:
                await self._consume(member, batch_id, until)
            member.owed.pop(batch_id, None)

    async def acknowledge(self, batch_id: str) -> dict[str, Any]:
        """Consume a batch for good; acknowledging it twice is the same as once.

        Raises:
            Conflict: its lease has ended; its groups went back.
            NotFound: there never was such a batch.
            NotNow: a shard that has a part of it is lost, and consumes it when it returns; asking again tells.
        """
        carried = self._tasks.spawn(f"ack:{batch_id}", self._acknowledge(batch_id), handled=True)
        carried.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(carried)
        return {"batch_id": batch_id, "acknowledged": True}

    async def _acknowledge_all(self, batch_ids: Iterable[str]) -> tuple[str, ...]:
        """Consume batches; returns those whose lease has ended. What a lost shard has is consumed when it returns."""
        expired = []
        for batch_id in batch_ids:
            try:
                await self.acknowledge(batch_id)
            except (Conflict, NotFound):
                expired.append(batch_id)
            except NotNow:
                continue
        return tuple(expired)

    async def _acknowledge(self, batch_id: str) -> None:
        batch = self._leased.get(batch_id)
        if batch is None:
            if (fate := self._fates.get(batch_id)) == "acknowledged":
                return
            if fate is None:
                raise NotFound(f"no batch {batch_id}")
            raise self._over(batch_id)
        if not batch.acking:
            batch.acking = True
            self._set_timer()
            for shard in batch.parts:
                self._members.by_id[shard].owed[batch_id] = "ack"
        await self._members.fan([self._members.by_id[shard] for shard in batch.parts], self.pay)
        if self._fates.get(batch_id) == "expired":
            raise self._over(batch_id)
        waiting = [shard for shard in batch.parts if shard not in batch.acked]
        if waiting:
            told = "; ".join(f"shard {shard}: {self._members.by_id[shard].why}" for shard in waiting)
            message = f"batch {batch_id} is acknowledged, and consumed when its shards return: {told}"
            raise NotNow("not_enough", message, detail={"batch_id": batch_id, "shards": waiting})

    def _over(self, batch_id: str) -> Conflict:
        message = f"the lease of batch {batch_id} has ended; its groups went back"
        detail = {"batch_id": batch_id, "leases": list(self._leased)}
        return Conflict(message, type="lease_expired", detail=detail)

    async def _consume(self, member: Member, batch_id: str, until: float) -> None:
        batch = self._leased.get(batch_id)
        if batch is None or member.shard_id in batch.acked:
            return
        try:
            await member.call("ack", {"batch_id": batch_id}, until)
        except (Conflict, NotFound):
            if batch.lives[member.shard_id] == member.shard.life:  # it ended there, before it did here
                self._end(batch, "expired")
                raise
            # In a life before it was consumed, or it went with that life: there is nothing to consume any more.
        batch.acked.add(member.shard_id)
        if batch.acked >= set(batch.parts):
            self._end(batch, "acknowledged")

    def _end(self, batch: MergedBatch, fate: str) -> None:
        self._leased.pop(batch.batch_id, None)
        self._fates[batch.batch_id] = fate
        while len(self._fates) > _REMEMBERED:
            del self._fates[next(iter(self._fates))]
        self._set_timer()
        if fate == "expired":
            members = [self._members.by_id[shard] for shard in batch.parts if shard not in batch.acked]
            self._tasks.spawn(f"give_back:{batch.batch_id}", self._give_back(batch.batch_id, members), handled=True)

    def _set_timer(self) -> None:
        self.close()
        ends = min((batch.expires_at for batch in self._leased.values() if not batch.acking), default=None)
        if ends is not None:
            self._timer = asyncio.get_running_loop().call_at(ends, self._expire)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for batch in [batch for batch in self._leased.values() if batch.expires_at <= now and not batch.acking]:
            self._end(batch, "expired")
        self._set_timer()

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def returned(self, member: Member, status: dict[str, Any]) -> None:
        """A shard is held: it pays what it owes, and what is gone with its life before is ended everywhere."""
        await self.pay(member)
        there = {lease["batch_id"] for lease in status["buffer"]["leases"]}
        for batch in [batch for batch in self._leased.values() if member.shard_id in batch.parts]:
            lost = batch.batch_id not in there and member.shard_id not in batch.acked
            if lost and not batch.acking and batch.lives[member.shard_id] != member.shard.life:
                self._end(batch, "expired")
        known = (*self._leased, *self._fates, *self._lending)
        self._found.see(member.shard_id, status["buffer"]["leases"], known)
        for batch_id in tuple(self._found.parts):
            await self._recall(batch_id)

    async def _recall(self, batch_id: str) -> None:
        """Go on with a batch of an earlier coordinator's; what it did not finish lending is given back."""
        parts, verdict = self._found.parts[batch_id], self._found.verdict(batch_id)
        members = [member for member in self._members.all if member.shard_id in parts]
        now = asyncio.get_running_loop().time()
        until = now + self._answer_s
        if verdict == "unknown":
            return
        if verdict == "whole":
            step = self._found.step_of(batch_id)
            leased: dict[str, Leased] = {}
            for member in members:
                asked = member.shard.lease(step, parts[member.shard_id][1], batch_id)
                leased[member.shard_id] = await member.ask("lease", asked, until)
            lives = {shard: self._members.by_id[shard].shard.life for shard in leased}
            metrics = merge_figures([part.metrics for part in leased.values()], 0.0, 0.0)
            self._leased[batch_id] = MergedBatch(batch_id, step, leased, lives, metrics, now + self._lease_s)
            self._set_timer()
        else:
            others = [member for member in self._members.all if member.shard_id not in parts]
            asked_others = await self._members.fan(
                others, lambda member: member.call("ack", {"batch_id": batch_id}, until)
            )
            acked = bool(answers(asked_others))  # a part that is consumed: the ack was accepted, and cut short
            if not acked and any(isinstance(outcome, ShardLost) for outcome in asked_others.values()):
                return
            for member in members:
                if acked:
                    await member.call("ack", {"batch_id": batch_id}, until)
                else:
                    await member.ask("give_back", member.shard.give_back(batch_id), until)
            self._fates[batch_id] = "acknowledged" if acked else "expired"
        self._found.parts.pop(batch_id, None)
        self.wake()

    def _shortage(self, gathering: Gathering | None, groups: int) -> NotNow:
        """Why a batch is not there: which shard lacks what."""
        ready = gathering.ready if gathering is not None else {}
        final = gathering.final if gathering is not None else {}
        shares = share_out(groups, {member.shard_id: groups for member in self._members.all})
        shards: dict[str, Any] = {}
        for member in self._members.all:
            said = final.get(member.shard_id)
            waiting_for = ((member.known or {}).get("producer") or {}).get("waiting_for", "")
            shards[member.shard_id] = {
                "ready": ready.get(member.shard_id, 0),
                "wanted": shares[member.shard_id],
                "reason": member.why or (said.message if said is not None else waiting_for),
                **({"detail": said.detail} if said is not None else {}),
            }
        lacking = {name: told for name, told in shards.items() if told["ready"] < told["wanted"]}
        told = "; ".join(
            f"{name} has {one['ready']} of {one['wanted']}: {one['reason']}" for name, one in lacking.items()
        )
        hopeless = gathering is not None and gathering.hopeless
        kind: NotNowType = "paused" if self._paused() else "not_enough"
        if hopeless and final:
            kinds = {error.type for error in final.values()}
            kind = "exhausted" if kinds == {"exhausted"} else "failed" if kinds == {"failed"} else kind
        total = sum(ready.values())
        detail = {"ready": total, "wanted": groups, "can_be_met": not hopeless, "shards": shards}
        return NotNow(kind, f"{total} of {groups} groups are ready: {told}", detail=detail)


def _check(step: int, groups: int, timeout_s: float) -> None:
    for path, value, least in (("step", step, 0), ("groups", groups, 1)):
        if type(value) is not int or value < least:
            raise BadRequest.at(path, f"expected a whole number, {least} or greater")
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise BadRequest.at("timeout_s", "expected a finite number, 0 or greater")
