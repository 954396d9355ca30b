"""What was handed over, and judged apart from training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_svc.events.base import Event

__all__ = ["BatchAcked", "BatchTaken", "EvaluationFinished", "EvaluationStarted", "LeaseExpired"]


@dataclass(frozen=True, slots=True)
class BatchTaken(Event):
    """A batch was leased to a trainer."""

    batch_id: str
    step: int
    groups: int
    samples: int
    wait_s: float
    metrics: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BatchAcked(Event):
    """A batch was consumed for good."""

    batch_id: str
    step: int
    groups: int


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """A lease ended without an ack; its groups are ready again."""

    batch_id: str
    step: int
    groups: int


@dataclass(frozen=True, slots=True)
class EvaluationStarted(Event):
    """An evaluation was taken, of the weights of `version`, or of those the fleet has when it begins."""

    evaluation_id: str
    task: str
    prompts: int
    version: int | None


@dataclass(frozen=True, slots=True)
class EvaluationFinished(Event):
    """An evaluation ended: `answered`, `cancelled` by its caller, or with the type of its error."""

    evaluation_id: str
    task: str
    outcome: str
    finished: int
    failed: int
    seconds: float
