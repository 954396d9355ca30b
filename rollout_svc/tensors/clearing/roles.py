"""Which processes could have fetched a shard: every role, on all its ranks.

Invariants:

- A rank of a role is one process at a time: a consumer that takes a rank puts an end to the one that had it.
- A process that plays several roles is one process: it is drained once, and named with all of them.
- A process is a consumer until no role names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rollout_svc.tensors.clearing.ports import Peer

__all__ = ["Consumer", "Roles"]

Rank = tuple[int, ...]


class Consumer(NamedTuple):
    """A process that fetches shards.

    Attributes:
        address: where it is reached: the address of its data plane, or of its actor.
        rank: which of its role it is, as (data-parallel, tensor-parallel); empty: its place in the list.
        incarnation: which of the processes at that address; None: it will say.
        peer: how to reach it; None: by its address.
    """

    address: str
    rank: Rank = ()
    incarnation: str | None = None
    peer: Peer | None = None


class Roles:
    """Who plays what."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[Rank, str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranks)

    def take(self, role: str, consumers: Iterable[Consumer]) -> tuple[str, ...]:
        """Give ranks of a role to processes; other ranks of it stay as they are.

        Returns:
            Addresses of the processes that have no rank in any role any more.

        Raises:
            ValueError: two of them are on one rank; none was given.
        """
        given: dict[Rank, str] = {}
        for place, consumer in enumerate(consumers):
            rank = consumer.rank or (place,)
            if given.setdefault(rank, consumer.address) != consumer.address:
                raise ValueError(f"{role}{list(rank)}: expected one process, not {given[rank]} and {consumer.address}")
        before = set(self.addresses())
        self._ranks.setdefault(role, {}).update(given)
        return tuple(before - set(self.addresses()))

    def leave(self, role: str, rank: Rank | None = None) -> tuple[str, ...]:
        """End a role, or one rank of it; an unknown one ended already.

        Returns:
            Addresses of the processes that have no rank in any role any more.
        """
        before = set(self.addresses())
        ranks = self._ranks.get(role, {})
        for one in list(ranks) if rank is None else [rank]:
            ranks.pop(one, None)
        if not ranks:
            self._ranks.pop(role, None)
        return tuple(before - set(self.addresses()))

    def addresses(self) -> Iterator[str]:
        """Yield the address of every consumer, as often as it has a rank."""
        for ranks in self._ranks.values():
            yield from ranks.values()

    def parts(self, address: str) -> tuple[str, ...]:
        """Name the ranks of a process: `actor[0,1]`; empty where it has none."""
        return tuple(
            f"{role}[{','.join(map(str, rank))}]"
            for role, ranks in self._ranks.items()
            for rank, at in ranks.items()
            if at == address
        )
