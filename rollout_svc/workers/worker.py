"""The service's view of one engine: its state, its limit, and what it runs for us.

Invariants:

- A call is in `calls` from the line that claims its slot to the line that gives it back; nothing else counts.
- `accepts` is true only in state ACTIVE, below the limit, with the breaker letting traffic through.
- The state changes in `become` alone, which tells its listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rollout_svc.engines import Dialect, Endpoint
from rollout_svc.gate import Lane
from rollout_svc.workers.breaker import Breaker

__all__ = ["AbortReason", "EngineCall", "Quarantine", "Worker", "WorkerState"]

AbortReason = Literal["pause", "stale", "timeout", "client", "overload", "shutdown", "worker_dead"]


class WorkerState(StrEnum):
    """Where a worker stands; only ACTIVE gets traffic."""

    STARTING = "STARTING"
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    QUARANTINED = "QUARANTINED"
    RECOVERING = "RECOVERING"
    DEAD = "DEAD"


@dataclass(eq=False, slots=True)
class EngineCall:
    """One engine call under way.

    Attributes:
        request_id: the wire id.
        epoch: the lane's epoch when it was dispatched.
        since: loop time of the dispatch, seconds.
        scope: its time limit; moving that to now is how the call alone is cancelled, not the task around it.
        cancelled_for: why it was cancelled, if it was.
        aborts: how often an abort by its id was sent.
    """

    request_id: str
    sample_id: str
    lane: Lane
    epoch: int
    since: float
    scope: asyncio.Timeout | None = None
    cancelled_for: AbortReason | None = None
    aborts: int = 0

    def cancel(self, reason: AbortReason) -> bool:
        """End the wait for the answer and close its connection; returns whether this call did it."""
        if self.cancelled_for is not None or self.scope is None or self.scope.expired():
            return False
        self.cancelled_for = reason
        self.scope.reschedule(asyncio.get_running_loop().time())
        return True


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a worker gets no traffic.

    Attributes:
        kind: `residual`: a pause left requests running there; `version`: it does not have the current weights.
        since: loop time, seconds.
    """

    kind: Literal["residual", "version"]
    since: float


class Worker:
    """One engine as the pool sees it; see the module's invariants."""

    __slots__ = (
        "_on_change",
        "answered",
        "attention",
        "breaker",
        "calls",
        "capabilities",
        "dialect",
        "endpoint",
        "exclusive",
        "held",
        "limit",
        "max_batch",
        "probe_failures",
        "quarantine",
        "reason",
        "residual",
        "state",
        "version",
        "worker_id",
    )

    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: Endpoint,
        dialect: Dialect,
        max_batch: int | None,
        exclusive: bool,
        breaker: Breaker,
        on_change: Callable[[Worker, WorkerState, WorkerState, str], None],
    ) -> None:
        self.worker_id = worker_id
        self.endpoint = endpoint
        self.dialect = dialect
        self.max_batch = max_batch
        self.exclusive = exclusive
        self.breaker = breaker
        self.limit = 0
        self.state = WorkerState.STARTING
        self.reason = "not reached yet"
        self.calls: dict[str, EngineCall] = {}
        self.capabilities: tuple[str, ...] = ()
        self.version: int | None = None
        self.answered = 0
        self.probe_failures = 0
        self.residual: int | None = None
        self.quarantine: Quarantine | None = None
        self.held = False
        self.attention = asyncio.Event()
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<Worker {self.worker_id} {self.state} {len(self.calls)}/{self.limit} v{self.version}>"

    @property
    def accepts(self) -> bool:
        """Whether a new request may be sent now."""
        if self.state is not WorkerState.ACTIVE or self.held:
            return False
        limit = self.limit if self.breaker.state == "closed" else 1
        return len(self.calls) < limit

    @property
    def load(self) -> float:
        """Share of the limit that is in use."""
        return len(self.calls) / self.limit if self.limit else 1.0

    def in_lanes(self, lanes: frozenset[Lane]) -> list[EngineCall]:
        """Calls of these lanes under way."""
        return [call for call in self.calls.values() if call.lane in lanes]

    def put_in_quarantine(self, kind: Literal["residual", "version"], reason: str) -> None:
        """Keep it from traffic until what `kind` asks for is shown."""
        self.quarantine = Quarantine(kind, asyncio.get_running_loop().time())
        self.become(WorkerState.QUARANTINED, reason)

    def become(self, state: WorkerState, reason: str) -> None:
        """Change state, say why, and wake whoever looks after this worker."""
        if state is not WorkerState.QUARANTINED:
            self.quarantine = None
        before = self.state
        self.state = state
        self.reason = reason
        self.attention.set()
        if before is not state:
            self._on_change(self, before, state, reason)

    def as_json(self) -> dict[str, Any]:
        """Return the record of `status.workers`."""
        return {
            "id": self.worker_id,
            "url": self.endpoint.url,
            "dialect": self.dialect.name,
            "state": str(self.state),
            "reason": self.reason,
            "in_flight": len(self.calls),
            "limit": self.limit,
            "capabilities": list(self.capabilities),
            "weight_version": self.version,
        }
