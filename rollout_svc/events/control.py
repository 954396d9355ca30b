"""What a trainer asked of the stage as a whole: pauses and new weights."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_svc.events.base import Event
from rollout_svc.gate import Lane, Mode

__all__ = ["PauseFinished", "PauseStarted", "Resumed", "RungReached", "WeightsUnconfirmed", "WeightsUpdated"]


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
    """An update ended; `odd` names the workers it did not reach, `phases` are seconds, but for `resume`."""

    version: int
    kind: str
    seconds: float
    ok: bool
    odd: tuple[str, ...]
    phases: dict[str, float]
