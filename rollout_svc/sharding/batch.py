"""A batch whose groups lie in several shards.

Invariants:

- Its id says how many groups it has, so that a coordinator that begins anew can tell a whole batch from a part.
- Its groups are asked for when somebody wants them; they are the same, in the same order, whoever asks.
- Its routed experts are asked for so, too: where they lie, and nothing of them passes through here.
- It is acknowledged as a whole: a part that was says so, and is not asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from rollout_svc.heavy import Heavy
from rollout_svc.packing.batch import Row
from rollout_svc.packing.parts import joined
from rollout_svc.sharding.protocol import Leased

__all__ = ["MergedBatch", "groups_in", "with_groups"]

T = TypeVar("T")


def with_groups(unique: str, groups: int) -> str:
    """The id of a batch of so many groups."""
    return f"{unique}-{groups}"


def groups_in(batch_id: str) -> int | None:
    """How many groups a batch has, by its id; None: it is no coordinator's."""
    number = batch_id.rpartition("-")[2]
    return int(number) if number.isdecimal() and number.isascii() else None


@dataclass(eq=False)
class MergedBatch:
    """A leased batch.

    Attributes:
        parts: what each shard leased, in the order of the shards.
        lives: of the shards, when they did.
        metrics: figures of all of it.
        expires_at: loop time at which its lease ends.
        acked: shards that have consumed their part.
        acking: somebody acknowledged it: it will be consumed, and cannot expire any more.
        ack_expired: batches whose ack came too late, with this take.
    """

    batch_id: str
    step: int
    parts: dict[str, Leased]
    lives: dict[str, int]
    metrics: dict[str, Any]
    expires_at: float
    acked: set[str] = field(default_factory=set)
    acking: bool = False
    ack_expired: tuple[str, ...] = ()

    def head(self) -> dict[str, Any]:
        """The record without its groups."""
        head: dict[str, Any] = {"batch_id": self.batch_id, "step": self.step, "metrics": self.metrics}
        return head | ({"ack_expired": self.ack_expired} if self.ack_expired else {})

    async def encoded(self) -> AsyncIterator[bytes]:
        """The record of the contract as JSON, in pieces to be joined, one per group.

        Raises:
            ShardLost: a shard went with its part; taking the same step again gives it once it has returned.
        """
        yield orjson.dumps(self.head())[:-1] + b',"groups":['
        first = True
        for part in self.parts.values():
            for record in await part.records():
                yield record if first else b"," + record
                first = False
        yield b"]}"

    async def experts(self) -> dict[str, Heavy]:
        """Routed experts by sample id; see `Leased.experts`.

        Raises:
            ShardLost: as `encoded` does.
        """
        found: dict[str, Heavy] = {}
        for outcome in _all_of(await self._asked(lambda part: part.experts())):
            found |= outcome
        return found

    async def experts_of(self, sample_id: str) -> Heavy | None:
        """Those of one sample; None: it is in no part, and every part was asked.

        Raises:
            ShardLost: nobody has it who could be asked, and somebody could not.
        """
        outcomes = await self._asked(lambda part: part.experts(sample_id))
        found = (outcome for outcome in outcomes if not isinstance(outcome, BaseException) and sample_id in outcome)
        if (having := next(found, None)) is not None:
            return having[sample_id]
        _all_of(outcomes)
        return None

    async def to_pack(self) -> tuple[list[Row], bytes]:
        """Its rows and its head, to be packed as tensors; raises as `experts` does."""
        return joined(self.head(), _all_of(await self._asked(lambda part: part.part())))

    async def _asked(self, ask: Callable[[Leased], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Ask every part: whoever fails holds up none of the others."""
        return await asyncio.gather(*map(ask, self.parts.values()), return_exceptions=True)

    async def as_json(self) -> dict[str, Any]:
        """The same record as values."""
        record: dict[str, Any] = orjson.loads(b"".join([piece async for piece in self.encoded()]))
        return record


def _all_of(outcomes: list[T | BaseException]) -> list[T]:
    """What all answered; raises what one failed with, and empties the list then.

    Whoever is told of the error keeps its frames: nothing may be left there of what the others answered, nor the error
    itself, which would keep all of it until the collector comes by.
    """
    failed = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if failed is None:
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    outcomes.clear()
    try:
        raise failed
    finally:
        del failed
