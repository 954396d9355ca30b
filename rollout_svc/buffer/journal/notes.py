"""What is noted, as values that may be written down by another thread later on.

Invariant: one note is written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout_svc.ledger import Account
from rollout_svc.sample.state import SampleState

__all__ = [
    "Admitted",
    "Consumed",
    "HandedBack",
    "Kept",
    "Leased",
    "Member",
    "Note",
    "Pushed",
    "Saved",
    "Settled",
    "Tallied",
    "Unleased",
    "Versioned",
]


class Member(NamedTuple):
    """A sample as it was.

    Attributes:
        head: `records.state_json` of it.
        routed: whether its routed experts are others than those it was noted with; else the state is without them.
    """

    group_id: str
    member: int
    state: SampleState
    head: bytes | None
    routed: bool = False


class Pushed(NamedTuple):
    """Lines by prompt id, JSON."""

    task: str
    lines: tuple[tuple[str, bytes], ...]


class Admitted(NamedTuple):
    """A prompt became a group; `used` is None where it came from no source."""

    group_id: str
    task: str
    prompt_id: str
    prompt: bytes
    ids: Sequence[int]
    size: int
    used: int | None
    source_state: bytes | None


class Kept(NamedTuple):
    """Samples, as they are now."""

    members: tuple[Member, ...]


class HandedBack(NamedTuple):
    """A group came back unfinished, its members as they are now."""

    group_id: str
    hand_backs: int
    cuts: int
    members: tuple[Member, ...]


class Saved(NamedTuple):
    """A group is ready; `members` are those that were not kept yet."""

    group_id: str
    members: tuple[Member, ...]


class Settled(NamedTuple):
    """A group ended without a trainer."""

    group_id: str
    outcome: Account
    again: bool


class Leased(NamedTuple):
    """A batch was lent until `expires_at`, wall-clock seconds since the epoch; `metrics` is JSON."""

    batch_id: str
    step: int
    group_ids: tuple[str, ...]
    expires_at: float
    metrics: bytes


class Unleased(NamedTuple):
    """A lease ended by time."""

    batch_id: str
    group_ids: tuple[str, ...]


class Consumed(NamedTuple):
    """A lease ended by its ack."""

    batch_id: str
    step: int
    group_ids: tuple[str, ...]


class Versioned(NamedTuple):
    """The fleet has other weights, which can be loaded again from `path`."""

    version: int
    path: str | None = None


class Tallied(NamedTuple):
    """The tallies beside the ledger's accounts."""

    late_discarded: int
    redone: int


Note = Pushed | Admitted | Kept | HandedBack | Saved | Settled | Leased | Unleased | Consumed | Versioned | Tallied
