"""What a worker may be in, and since when: its state, a quarantine, a freeze, a sleep.

Invariant: records only; who enters and leaves them is the worker's to say, and its owners'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollout_svc.engines.memory import Tag, in_order

__all__ = ["Cache", "Freeze", "Quarantine", "Sleep", "WorkerState"]

Cache = Literal["keep", "drop"]
"""What becomes of the KV cache of frozen requests: kept as it is, or made again when they go on."""


class WorkerState(StrEnum):
    """Where a worker stands; only ACTIVE gets traffic."""

    STARTING = "STARTING"
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    QUARANTINED = "QUARANTINED"
    RECOVERING = "RECOVERING"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a worker gets no traffic.

    Attributes:
        kind: `residual`: a pause left requests running there; `version`: it does not have the current weights.
        since: loop time, seconds.
    """

    kind: Literal["residual", "version"]
    since: float


@dataclass(slots=True)
class Freeze:
    """A worker that is frozen, or may be.

    Attributes:
        cache: what becomes of its requests' KV cache.
        since: loop time, seconds.
        confirmed: the engine said so; until then it may be running.
        thawing: it was told to go on.
    """

    cache: Cache
    since: float
    confirmed: bool = False
    thawing: bool = False


@dataclass(slots=True)
class Sleep:
    """A worker whose engine sleeps, is on its way to, or may.

    Attributes:
        tags: the memory it is known to have given up.
        certain: nothing else may be true; no call is under way of which nobody knows the fate.
    """

    tags: set[Tag] = field(default_factory=set)
    certain: bool = True

    @property
    def listed(self) -> tuple[Tag, ...]:
        """Its tags in the order of waking."""
        return tuple(in_order(self.tags))
