"""What a trainer asked of the stage as a whole: pauses and new weights."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_svc.events.base import Event
from rollout_svc.gate import Lane, Mode

__all__ = [
    "PauseFinished",
    "PauseStarted",
    "Resumed",
    "RungReached",
    "WeightUpdateEnded",
    "WeightsProgress",
    "WeightsUnconfirmed",
    "WeightsUpdated",
]


@dataclass(frozen=True, slots=True)
class PauseStarted(Event):
    """A pause closed the gate."""

    ticket: int
    mode: Mode
    lanes: tuple[Lane, ...]
    deadline_s: float
    joined: bool


@dataclass(frozen=True, slots=True)
class RungReached(Event):
    """The ladder reached a rung with this much still pending."""

    ticket: int
    name: str
    at_s: float
    pending: int


@dataclass(frozen=True, slots=True)
class PauseFinished(Event):
    """A pause returned its report."""

    ticket: int
    mode: Mode
    clean: bool
    elapsed_s: float
    abandoned: int
    parked: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The gate opened again."""

    ticket: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class WeightsUnconfirmed(Event):
    """An engine that reports no versions was updated, and nobody asked it for a known answer; once for each worker."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class WeightsUpdated(Event):
    """The fleet has other weights, or an update failed; the gate is closed still.

    `odd` names the workers it did not reach; `phases` are the seconds of those until now.
    """

    version: int
    kind: str
    seconds: float
    ok: bool
    odd: tuple[str, ...]
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class WeightsProgress(Event):
    """An update is this far; told at most twice a second. `phase` is the one under way; None: between two."""

    version: int
    kind: str
    phase: str | None
    buckets: int
    bytes: int
    total_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightUpdateEnded(Event):
    """An update is over, with the pause around it where it made one; `phases` are seconds, `error` is empty if `ok`."""

    version: int
    kind: str
    ok: bool
    seconds: float
    phases: dict[str, float]
    buckets: int
    bytes: int
    error: str
