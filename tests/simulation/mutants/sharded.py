"""Mutants of a coordinator over shards.

Invariant: data only, as in `catalogue`.
"""

from __future__ import annotations

from typing import Final

from tests.simulation.mutants.mutant import Edit, Mutant

__all__ = ["SHARDED"]


def _mutant(name: str, bug: str, caught_by: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, bug, tuple(Edit(*edit) for edit in edits), frozenset(caught_by.split()), sharded=True)


SHARDED: Final = (
    _mutant(
        "part_of_a_batch_is_lent",
        "a shard that was lost while it leased its part is left out of the batch",
        "P2",
        ("sharding.taking", "if sum(part.count for part in leased.values()) != groups:", "if not leased:"),
    ),
    _mutant(
        "returned_opens_while_paused",
        "a shard that comes back opens although a pause holds the others",
        "P9",
        ("sharding.keeping", 'if self._pauses.state == "running":', "if True:"),
    ),
    _mutant(
        "returned_keeps_old_weights",
        "a shard that comes back opens with the weights it died with",
        "P24",
        ("sharding.keeping", "        await self._weights.bring(member)\n", ""),
    ),
    _mutant(
        "owed_ack_is_forgotten",
        "what a lost shard was to consume is not asked of it when it returns",
        "P31 hang",
        ("sharding.taking", "        await self.debts.pay(member)\n        there", "        there"),
    ),
)
