"""What shards have still to be told of batches: noted first, told as soon as they can be.

Invariants:

- What a shard owes is in the book before it is asked for something else, and out of it once it was paid.
- A shard that did not take what it was told is held, and pays before it opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.errors import RolloutError
from rollout_svc.sharding.book import Book, Debt
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members

__all__ = ["Debts"]


class Debts:
    """See the module's invariants; what each shard owes is its member's `owed`."""

    def __init__(
        self,
        members: Members,
        book: Book,
        consume: Callable[[Member, str, float], Awaitable[None]],
        *,
        answer_s: float,
    ) -> None:
        """Take over what the book has of an earlier coordinator.

        Args:
            members: the shards.
            book: where debts outlive the coordinator.
            consume: has a shard consume its part of a batch, until a loop time.
            answer_s: seconds a shard has for all that it owes.
        """
        self._members = members
        self._book = book
        self._consume = consume
        self._answer_s = answer_s
        for shard, owed in book.earlier.owed.items():
            members.by_id[shard].owed.update(owed)

    async def give_back(self, batch_id: str, members: Iterable[Member]) -> None:
        """End the lease in these shards; who cannot be told now is told when it returns."""
        asked = list(members)
        for member in asked:
            member.owed[batch_id] = "give_back"
        with suppress(JournalFailed):  # the book tells that itself
            await self.remain(batch_id)  # before they are asked, which may take long: callers know that it has ended
        await self._members.fan(asked, self.pay)

    async def remain(self, batch_id: str) -> list[str]:
        """Note who has still to be told of a batch, so that whoever comes after us tells them; returns them."""
        owing = {member.shard_id: member.owed[batch_id] for member in self._members.all if batch_id in member.owed}
        for what in sorted(set(owing.values())):
            await self._book.owe(batch_id, what, [shard for shard, owes in owing.items() if owes == what])
        return list(owing)

    async def pay(self, member: Member) -> None:
        """Have a shard do what it has not been told yet: all at once, for however much that is it has one deadline."""
        until = asyncio.get_running_loop().time() + self._answer_s

        async def one(batch_id: str, what: Debt) -> RolloutError | None:
            try:
                if what == "give_back":
                    await member.ask("give_back", member.shard.give_back(batch_id), until)
                else:
                    await self._consume(member, batch_id, until)
            except RolloutError as error:
                return error
            member.owed.pop(batch_id, None)
            self._book.paid(batch_id, member.shard_id)
            return None

        outcomes = await asyncio.gather(*(one(batch_id, what) for batch_id, what in member.owed.items()))
        failed = next((error for error in outcomes if error is not None), None)
        if failed is not None:
            member.fall(str(failed))  # nobody else would ask it again: it is held, and pays before it opens
            raise failed
