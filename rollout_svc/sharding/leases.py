"""What is lent over all shards, and what became of what was.

Invariants:

- A batch is lent, or it has a fate, or it is not known here; never two of these.
- A lease ends in one step, also of a batch with many parts; one that somebody acknowledges ends by that alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from rollout_svc.sharding.batch import MergedBatch, groups_in

__all__ = ["Leases"]

_REMEMBERED: Final = 1024  # ended batches whose fate is still told to a late ack


class Leases:
    """See the module's invariants.

    Attributes:
        by_id: what is lent, by batch.
        fates: of what was: `acknowledged`, or `expired`.
    """

    def __init__(self, fates: Mapping[str, str], over: Callable[[MergedBatch], None]) -> None:
        """Make them.

        Args:
            fates: of batches of an earlier coordinator.
            over: is told of a batch whose time is up, and ends it.
        """
        self.by_id: dict[str, MergedBatch] = {}
        self.fates = dict(fates)
        self._over = over
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Leases lent={len(self.by_id)} ended={len(self.fates)}>"

    def as_json(self) -> list[dict[str, Any]]:
        """What is lent, as status says it."""
        return [
            {"batch_id": batch.batch_id, "step": batch.step, "groups": groups_in(batch.batch_id) or 0}
            for batch in self.by_id.values()
        ]

    @property
    def readable(self) -> list[MergedBatch]:
        """Those that nobody acknowledged."""
        return [batch for batch in self.by_id.values() if not batch.acking]

    def at(self, step: int) -> MergedBatch | None:
        """The batch that is lent for a step, unless somebody acknowledged it."""
        return next((batch for batch in self.readable if batch.step == step), None)

    def lend(self, batch: MergedBatch) -> None:
        """It is lent from now on, until its time is up."""
        self.by_id[batch.batch_id] = batch
        self._set_timer()

    def acknowledge(self, batch: MergedBatch) -> None:
        """Somebody acknowledged it: its time counts no more."""
        batch.acking = True
        self._set_timer()

    def end(self, batch_id: str, fate: str) -> None:
        """It is lent no more, if it was; what became of it is remembered for a while."""
        self.by_id.pop(batch_id, None)
        self.fates[batch_id] = fate
        while len(self.fates) > _REMEMBERED:
            del self.fates[next(iter(self.fates))]
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer, for the lease that ends next."""
        self.close()
        ends = min((batch.expires_at for batch in self.readable), default=None)
        if ends is not None:
            self._timer = asyncio.get_running_loop().call_at(ends, self._expire)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for batch in [batch for batch in self.readable if batch.expires_at <= now]:
            self._over(batch)
        self._set_timer()

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
