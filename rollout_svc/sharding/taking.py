"""Batches over all shards: taken, acknowledged, given back, as a whole or not at all.

Invariants:

- One batch is lent at a time: who asks meanwhile for the same step gets that one.
- A batch is lent when every part of it is leased; what cannot be completed is given back, also by a shard that was lost
  before it could say what it leased: it owes that, and pays before it opens.
- The lease of the whole ends before that of any part, in one step, so that no part is consumed of a batch that expired.
- An ack is for good once it was accepted: a shard that is lost meanwhile consumes its part when it returns, also where
  the coordinator is lost before that.
- A batch of which a part is gone, with a shard that keeps no journal, is ended everywhere.
- Leases outlive the coordinator: another finds them in the shards, and what is not whole is ended, or, where a part was
  consumed, acknowledged. A step that was lent is not lent again before every shard has said what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from rollout_svc.batch import Shortage, check_take
from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.errors import Conflict, NotFound, NotNow, RolloutError
from rollout_svc.sharding.batch import MergedBatch, groups_in, with_groups
from rollout_svc.sharding.book import Book, Debt
from rollout_svc.sharding.debts import Debts
from rollout_svc.sharding.figures import merge_figures
from rollout_svc.sharding.finding import Found
from rollout_svc.sharding.gathering import Gathering
from rollout_svc.sharding.leases import Leases
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members, answers
from rollout_svc.sharding.protocol import Leased
from rollout_svc.sharding.recalling import Recalling
from rollout_svc.sharding.shares import share_out
from rollout_svc.sharding.shortage import shortage, undecided
from rollout_svc.tasks import TaskOwner, wait_until

__all__ = ["FannedBatches"]

_LEND_S: Final = 5.0  # seconds a take may last longer while its groups, which are there, are leased
_FATES: Final[dict[Debt, str]] = {"ack": "acknowledged", "give_back": "expired"}
_AGAIN_S: Final = 0.05  # seconds before a batch that could not be leased whole is tried again


class FannedBatches:
    """Takes, leases and acks; see the module's invariants."""

    def __init__(
        self,
        members: Members,
        tasks: TaskOwner,
        *,
        book: Book,
        lease_s: float,
        answer_s: float,
        new_id: Callable[[], str],
        paused_s: Callable[[], float],
        paused: Callable[[], bool],
        ahead: Callable[[int], Shortage | None],
        check: Callable[[], None],
    ) -> None:
        """Make them.

        Args:
            members: the shards.
            tasks: who carries a lease, and an ack.
            book: what has to outlive the coordinator, and is in no shard.
            lease_s: seconds a batch is lent for.
            answer_s: seconds a shard has to lease its part, or to consume it.
            new_id: gives unique ids.
            paused_s: seconds for which the stage was paused, ever.
            paused: whether it is.
            ahead: says that what the fleet makes is too old for a step; None: it is not.
            check: raises where the service has failed, or stops.
        """
        self._members = members
        self._tasks = tasks
        self._book = book
        self._lease_s = lease_s
        self._answer_s = answer_s
        self._new_id = new_id
        self._paused_s = paused_s
        self._paused = paused
        self._ahead = ahead
        self._check = check
        self._last_paused_s = 0.0
        self._turn = asyncio.Lock()
        fates: dict[str, str] = {}
        self.debts = Debts(members, book, self._consume, answer_s=answer_s)
        for owed in book.earlier.owed.values():
            fates.update({batch_id: _FATES[what] for batch_id, what in owed.items()})
        self._leases = Leases(fates, lambda batch: self._end(batch, "expired"))
        lent = {batch_id: step for batch_id, step in book.earlier.lent.items() if batch_id not in fates}
        self._found = Found(members.by_id, lent)
        self._recalling = Recalling(
            members, self._found, lease_s=lease_s, answer_s=answer_s, pay=self.debts.pay, recalled=self._recalled
        )
        self._lending: set[str] = set()
        self._lend_under_way: asyncio.Task[MergedBatch | None] | None = None
        self._gathering: Gathering | None = None

    @property
    def leases(self) -> list[dict[str, Any]]:
        """What is lent, as status says it."""
        return self._leases.as_json()

    @property
    def lent(self) -> list[MergedBatch]:
        """The batches that may be read: not those that somebody acknowledged."""
        return self._leases.readable

    def wake(self) -> None:
        """Something changed: whoever waits looks again."""
        if self._gathering is not None:
            self._gathering.wake.set()

    async def take(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> MergedBatch:
        """Lease a batch; the same step again gives the same batch while it is leased. See `Batches.take`."""
        check_take(step, groups, timeout_s)
        loop = asyncio.get_running_loop()
        started = loop.time()
        until = started + timeout_s
        expired = await self.acknowledge_all(ack)
        while True:
            if (again := self._leases.at(step)) is not None:
                if await self._whole(again, until):
                    return replace(again, ack_expired=expired)
                continue
            gathering: Gathering | None = None
            try:
                async with asyncio.timeout_at(until), self._turn:
                    self._check()
                    if self._lend_under_way is not None:  # of a take that has gone away, maybe, and of this step
                        await asyncio.wait({self._lend_under_way})
                    if self._leases.at(step) is not None:
                        continue
                    gathering = self._gathering = Gathering(self._members, self._tasks, step, groups, until)
                    await self._wait(gathering, step, groups)
                    if self._leases.at(step) is not None:
                        continue
                    lending = self._begin(self._lend(step, groups, gathering.ready, started))
                batch = await self._lent(lending, until)
            except TimeoutError:
                if step in self._found.steps and not self._paused():
                    raise undecided(self._members, self._found.unseen, step) from None
                told = shortage(self._members, gathering, groups, paused=self._paused(), ahead=self._ahead(step))
                raise told from None
            finally:
                if gathering is not None:
                    gathering.end()
            if batch is not None:
                return replace(batch, ack_expired=expired)
            await asyncio.sleep(_AGAIN_S)

    def _begin(self, lend: Coroutine[Any, Any, MergedBatch | None]) -> asyncio.Task[MergedBatch | None]:
        """Lend, whoever waits for it."""

        def ended() -> None:
            self._lend_under_way = None

        self._lend_under_way = self._tasks.spawn("lend", lend, on_end=ended)
        return self._lend_under_way

    async def _lent(self, lending: asyncio.Task[MergedBatch | None], until: float) -> MergedBatch | None:
        await wait_until((lending,), until + _LEND_S)
        if not lending.done():
            raise NotNow("not_enough", "the batch is being leased, and a shard does not answer: ask for the step again")
        return lending.result()

    async def _wait(self, gathering: Gathering, step: int, groups: int) -> None:
        while not gathering.enough or step in self._found.steps:
            self._check()
            if gathering.hopeless and not gathering.enough:
                raise shortage(self._members, gathering, groups, paused=self._paused())
            gathering.wake.clear()
            gathering.begin()
            await gathering.wake.wait()

    async def _whole(self, batch: MergedBatch, until: float) -> bool:
        """Lease again what a shard has in another life, under the same id; where it has it no more, the batch ends."""
        until += _LEND_S  # who has no time to wait is not to find a shard silent
        for shard, life in tuple(batch.lives.items()):
            member = self._members.by_id[shard]
            if (now := member.shard.life) != life and shard not in batch.acked:
                status = await self._say(member, member.call("status", {}, until))
                there = {lease["batch_id"]: lease["groups"] for lease in status["buffer"]["leases"]}
                part = batch.parts[shard]
                if there.get(batch.batch_id) == part.count and member.shard.life == now:
                    asked = member.shard.lease(batch.step, part.count, batch.batch_id)
                    batch.parts[shard] = await self._say(member, member.ask("lease", asked, until))
                    batch.lives[shard] = now
                elif status["state"] == "starting":
                    raise NotNow("not_enough", f"a part of the batch is in shard {shard}, which is starting")
                elif not batch.acking and batch.batch_id in self._leases.by_id:
                    self._end(batch, "expired")  # what is ready there by now is another batch
        return batch.batch_id in self._leases.by_id and not batch.acking

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

        await self._book.lend(batch_id, step)
        self._lending.add(batch_id)
        asked = [member for member in self._members.all if member.shard_id in parts]
        outcomes = answers(await self._members.fan(asked, lease))
        leased = {shard: part for shard, part in outcomes.items() if part.count}
        self._lending.discard(batch_id)
        if sum(part.count for part in leased.values()) != groups:
            self._leases.end(batch_id, "expired")
            await self.debts.give_back(batch_id, asked)
            self._book.ended(batch_id)
            return None
        paused_s = self._paused_s()
        pause_s, self._last_paused_s = paused_s - self._last_paused_s, paused_s
        metrics = merge_figures([part.metrics for part in leased.values()], loop.time() - started, pause_s)
        batch = MergedBatch(batch_id, step, leased, lives, metrics, ends)
        self._leases.lend(batch)
        return batch

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

    async def acknowledge_all(self, batch_ids: Iterable[str]) -> tuple[str, ...]:
        """Consume batches; returns those whose lease has ended. What a lost shard has is consumed when it returns."""
        expired = []
        for batch_id in batch_ids:
            try:
                await self.acknowledge(batch_id)
            except (Conflict, NotFound):
                expired.append(batch_id)
            except JournalFailed:  # it is not known to last
                raise
            except NotNow:
                accepted = batch_id in self._leases.by_id or self._leases.fates.get(batch_id) == "acknowledged"
                if not accepted:
                    raise
        return tuple(expired)

    async def _acknowledge(self, batch_id: str) -> None:
        batch = self._leases.by_id.get(batch_id)
        if batch is None:
            if (fate := self._leases.fates.get(batch_id)) == "acknowledged":
                await self._settle(batch_id, [member for member in self._members.all if batch_id in member.owed])
                return
            if fate is None and groups_in(batch_id) is not None:
                if self._found.may_have(batch_id):
                    raise NotNow("starting", f"not every shard has said yet whether it has a part of batch {batch_id}")
                fate = await self._recalling.fate(batch_id)
            if fate is None:
                raise NotFound(f"no batch {batch_id}")
            if fate == "acknowledged":
                return
            raise self._over(batch_id)
        if not batch.acking:
            self._leases.acknowledge(batch)
            for shard in batch.parts:
                self._members.by_id[shard].owed[batch_id] = "ack"
        await self._settle(batch_id, [self._members.by_id[shard] for shard in batch.parts])

    async def _settle(self, batch_id: str, members: list[Member]) -> None:
        """Have shards consume their parts; what one cannot now is owed, and will last."""
        await self._members.fan(members, self.debts.pay)
        if self._leases.fates.get(batch_id) == "expired":
            raise self._over(batch_id)
        waiting = await self.debts.remain(batch_id)
        if waiting:
            told = "; ".join(f"shard {shard}: {self._members.by_id[shard].why}" for shard in waiting)
            message = f"batch {batch_id} is acknowledged, and consumed when its shards return: {told}"
            raise NotNow("not_enough", message, detail={"batch_id": batch_id, "shards": waiting})

    def _over(self, batch_id: str) -> Conflict:
        message = f"the lease of batch {batch_id} has ended; its groups went back"
        detail = {"batch_id": batch_id, "leases": list(self._leases.by_id)}
        return Conflict(message, type="lease_expired", detail=detail)

    async def _consume(self, member: Member, batch_id: str, until: float) -> None:
        batch = self._leases.by_id.get(batch_id)
        if batch is None:
            if self._leases.fates.get(batch_id) != "expired":  # with an earlier coordinator
                with suppress(Conflict, NotFound):
                    await member.call("ack", {"batch_id": batch_id}, until)
            return
        if member.shard_id in batch.acked:
            return
        try:
            await member.call("ack", {"batch_id": batch_id}, until)
        except (Conflict, NotFound):
            if batch.lives[member.shard_id] == member.shard.life:  # it ended there, before it did here
                self._end(batch, "expired")
                return
            # In a life before it was consumed, or it went with that life: there is nothing to consume any more.
        batch.acked.add(member.shard_id)
        if batch.acked >= set(batch.parts):
            self._end(batch, "acknowledged")

    def _end(self, batch: MergedBatch, fate: str) -> None:
        self._leases.end(batch.batch_id, fate)
        if fate != "expired":
            self._book.ended(batch.batch_id)
        else:  # in the book it has once its parts are owed, in one step with that
            members = [self._members.by_id[shard] for shard in batch.parts if shard not in batch.acked]
            self._tasks.spawn(
                f"give_back:{batch.batch_id}", self.debts.give_back(batch.batch_id, members), handled=True
            )

    def close(self) -> None:
        """Stop the timer; idempotent."""
        self._leases.close()

    async def returned(self, member: Member, status: dict[str, Any]) -> None:
        """A shard is held: it pays what it owes, and what is gone with its life before is ended everywhere."""
        await self.debts.pay(member)
        there = {lease["batch_id"] for lease in status["buffer"]["leases"]}
        for batch in [batch for batch in self._leases.by_id.values() if member.shard_id in batch.parts]:
            lost = batch.batch_id not in there and member.shard_id not in batch.acked
            if lost and not batch.acking and batch.lives[member.shard_id] != member.shard.life:
                self._end(batch, "expired")
        known = (*self._leases.by_id, *self._leases.fates, *self._lending)
        self._found.see(member.shard_id, status["buffer"]["leases"], known)
        await self._recalling.recall()
        for batch_id in self._found.absent():
            self._book.ended(batch_id)

    def _recalled(self, batch_id: str, batch: MergedBatch | None, fate: str) -> None:
        """It is known what became of an earlier coordinator's batch: it is lent again, or has ended."""
        self._found.settle(batch_id)
        if batch is None:
            self._leases.end(batch_id, fate)
            self._book.ended(batch_id)
        else:
            self._leases.lend(batch)
        self.wake()
