"""What a pause found and did: the record the caller gets.

Invariants:

- Per worker, `in_flight` at the gate = `answered` + `cancelled` + what is still open.
- `clean` is true exactly when nothing is abandoned.
- `offloaded` names what each engine gave up where that was asked for, `not_offloaded` why one did not.
- `residual` is the engine's own count less other lanes' requests, or None where it cannot be had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_svc.engines.memory import Tag

__all__ = ["Abandoned", "PauseReport", "RungRecord", "WorkerTally"]


@dataclass(slots=True)
class WorkerTally:
    """One worker over one pause; `uncounted`: which of the engines behind a router could not count."""

    in_flight: int = 0
    answered: int = 0
    late: int = 0
    cancelled: int = 0
    abandoned: int = 0
    residual: int | None = None
    uncounted: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the record of the contract; `uncounted` only where there is something to say."""
        return {
            "in_flight": self.in_flight,
            "answered": self.answered,
            "late": self.late,
            "cancelled": self.cancelled,
            "abandoned": self.abandoned,
            "residual": self.residual,
            **({"uncounted": list(self.uncounted)} if self.uncounted else {}),
        }


@dataclass(frozen=True, slots=True)
class RungRecord:
    """A rung that was reached, seconds after the pause began, with what was pending there."""

    name: str
    at_s: float
    pending: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What still runs: `worker` is None for a task of ours, `sample_id` is None where the engine only counts."""

    sample_id: str | None
    worker: str | None
    age_s: float


@dataclass(frozen=True, slots=True)
class PauseReport:
    """The answer to `pause`."""

    ticket: int
    mode: str
    elapsed_s: float
    rungs: list[RungRecord]
    workers: dict[str, WorkerTally]
    parked: list[str]
    abandoned: list[Abandoned]
    ledger: dict[str, Any] = field(repr=False)
    offloaded: dict[str, list[Tag]] = field(default_factory=dict)
    not_offloaded: dict[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Nothing is abandoned."""
        return not self.abandoned

    def as_json(self) -> dict[str, Any]:
        """Return the record of the contract."""
        return {
            "ticket": self.ticket,
            "mode": self.mode,
            "clean": self.clean,
            "elapsed_s": round(self.elapsed_s, 6),
            "rungs": [{"name": r.name, "at_s": round(r.at_s, 6), "pending": r.pending} for r in self.rungs],
            "workers": {name: tally.as_json() for name, tally in self.workers.items()},
            "parked": self.parked,
            "abandoned": [
                {"sample_id": a.sample_id, "worker": a.worker, "age_s": round(a.age_s, 3)} for a in self.abandoned
            ],
            "ledger": self.ledger,
            "offloaded": self.offloaded,
            "not_offloaded": self.not_offloaded,
        }
