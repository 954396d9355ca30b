"""A batch whose groups lie in several places, packed as one.

Invariants:

- What is packed of parts, in order, is what would be packed of one batch of all their groups.
- A part has values only, but for its routed experts: those stay where they are until the body is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson

from rollout_svc.batch import Batch
from rollout_svc.errors import NotNow
from rollout_svc.packing.batch import Row, listed, rows
from rollout_svc.tensors import ReadHandle

__all__ = ["InParts", "LendsParts", "Part", "joined", "part_of", "unreadable"]


class Part(NamedTuple):
    """What is to be packed of some groups of a batch.

    Attributes:
        rows: of their samples; groups are counted from 0.
        groups: what the head says of them, JSON, with commas between.
        samples: likewise.
    """

    rows: list[Row]
    groups: bytes
    samples: bytes


@runtime_checkable
class InParts(Protocol):
    """A leased batch whose groups lie elsewhere: reading them may fail, and taking the step again gives them."""

    @property
    def batch_id(self) -> str:
        """Its id."""

    def encoded(self) -> AsyncIterator[bytes]:
        """The record of the contract as JSON, in pieces to be joined."""

    async def to_pack(self) -> tuple[list[Row], bytes]:
        """Its rows, and its head."""


@runtime_checkable
class LendsParts(Protocol):
    """Who lends such batches."""

    async def experts_of(self, sample_id: str) -> ReadHandle:
        """The routed experts of one sample that is lent; see `Batches.experts_of`."""


def part_of(batch: Batch) -> Part:
    """Take what is to be packed of a leased batch, which is a part of another.

    Raises:
        IllegalTransition: a sample is not COMPLETED.
    """
    groups, samples = listed(batch)
    return Part(rows(batch), orjson.dumps(groups)[1:-1], orjson.dumps(samples)[1:-1])


def joined(head: Mapping[str, Any], parts: Sequence[Part]) -> tuple[list[Row], bytes]:
    """Put parts together.

    Args:
        head: the record of the whole without its groups.
        parts: in their order; each has a row at least.

    Returns:
        the rows of all, and the head, as `pack` wants them.
    """
    taken: list[Row] = []
    for part in parts:
        before = taken[-1].group + 1 if taken else 0
        taken += [row._replace(group=row.group + before) for row in part.rows]
    groups, samples = (part.groups for part in parts), (part.samples for part in parts)
    return taken, orjson.dumps({**head, "groups": _list(groups), "samples": _list(samples)})


def _list(pieces: Iterable[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def unreadable(batch_id: str, why: Exception) -> NotNow:
    """Make the error of a batch that is leased, and of which something is away."""
    return NotNow("not_enough", f"batch {batch_id} is leased, and cannot be read now: {why}")
