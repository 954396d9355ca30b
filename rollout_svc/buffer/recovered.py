"""What an earlier life left behind, as values.

Invariant: it is whole: every group a lease names is among the groups, and nothing in it is under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rollout_svc.ledger import Account
from rollout_svc.prompt import Prompt
from rollout_svc.sample.state import SampleState

__all__ = ["FoundGroup", "FoundLease", "Position", "Pushed", "Recovered"]


class Position(NamedTuple):
    """Where a source stands once a line is used up.

    Attributes:
        used: lines used up since the beginning of the source.
        state: what the source itself says of its position; JSON, None where `used` says it all.
    """

    used: int
    state: Any = None


class FoundGroup(NamedTuple):
    """A group that was admitted and not settled.

    Attributes:
        account: where it stood; what was under way is `aborted`.
        samples: of each member, in order, none of them under way.
    """

    group_id: str
    prompt: Prompt
    account: Literal["aborted", "ready", "leased"]
    hand_backs: int
    cuts: int
    samples: tuple[SampleState, ...]


class FoundLease(NamedTuple):
    """A lease in force; `expires_at` is wall-clock time, seconds since the epoch."""

    batch_id: str
    step: int
    group_ids: tuple[str, ...]
    expires_at: float
    metrics: dict[str, Any]


class Pushed(NamedTuple):
    """What was pushed to a task.

    Attributes:
        known: every id there ever was.
        lines: those not used up, in order: content by prompt id.
    """

    known: frozenset[str] = frozenset()
    lines: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything that is needed to go on.

    Attributes:
        groups: ready and leased ones in the order they are handed over, then the others, oldest first.
        leases: oldest first.
        ended: how ended leases ended, oldest first.
        positions: of the sources, by task.
        pushed: by task.
        returned: prompts that an earlier step gave back, to be admitted before all others; oldest first.
        again: prompts that wait to be admitted once more, oldest first.
        settled_groups: totals by task and outcome.
        settled_samples: totals by outcome.
        version: weight version the fleet had last; None where none was noted.
        weights_path: where those weights can be loaded from again; None where they cannot.
        step: last step whose batch was acknowledged; None where none was.
    """

    groups: tuple[FoundGroup, ...] = ()
    leases: tuple[FoundLease, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    positions: Mapping[str, Position] = field(default_factory=dict)
    pushed: Mapping[str, Pushed] = field(default_factory=dict)
    returned: tuple[Prompt, ...] = ()
    again: tuple[Prompt, ...] = ()
    settled_groups: Mapping[str, Mapping[Account, int]] = field(default_factory=dict)
    settled_samples: Mapping[Account, int] = field(default_factory=dict)
    late_discarded: int = 0
    redone: int = 0
    version: int | None = None
    weights_path: str | None = None
    step: int | None = None

    def __bool__(self) -> bool:
        return self != Recovered()
