"""All shards: asked at once, under one deadline.

Invariant: one that is slow, silent or lost costs the others nothing, and has an outcome of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rollout_svc.errors import RolloutError
from rollout_svc.sharding.accounts import ledger_sum
from rollout_svc.sharding.member import Member

__all__ = ["Members", "answers"]

T = TypeVar("T")
Outcomes = dict[str, T | RolloutError]


class Members:
    """The shards in their order, which is that of the configuration."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.by_id = {member.shard_id: member for member in members}

    @property
    def all(self) -> tuple[Member, ...]:
        """Every shard."""
        return tuple(self.by_id.values())

    @property
    def inside(self) -> tuple[Member, ...]:
        """Those in step."""
        return tuple(member for member in self.by_id.values() if member.inside)

    @property
    def outside(self) -> tuple[Member, ...]:
        """Those that are held until they are in step again."""
        return tuple(member for member in self.by_id.values() if not member.inside)

    @property
    def ledger(self) -> dict[str, Any]:
        """One ledger that sums."""
        return ledger_sum(member.ledger for member in self.by_id.values())

    async def fan(self, members: Iterable[Member], ask: Callable[[Member], Coroutine[Any, Any, T]]) -> Outcomes[T]:
        """Ask them all at once; errors of ours are outcomes. What is asked has a deadline itself."""

        async def one(member: Member) -> T | RolloutError:
            try:
                return await ask(member)
            except RolloutError as error:
                return error

        asked = list(members)
        outcomes = await asyncio.gather(*(one(member) for member in asked))
        return {member.shard_id: outcome for member, outcome in zip(asked, outcomes, strict=True)}


def answers(outcomes: Outcomes[T]) -> dict[str, T]:
    """Those that are answers."""
    return {shard: outcome for shard, outcome in outcomes.items() if not isinstance(outcome, RolloutError)}
