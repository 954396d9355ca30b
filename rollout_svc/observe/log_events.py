"""Events to log lines: info per batch and per pause, warnings for what went wrong, transitions at debug.

Invariant: an event whose level is filtered is not subscribed to at all, so it costs nothing on the way of a sample.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import structlog

from rollout_svc import events
from rollout_svc.observe.logs import LEVELS, Level

__all__ = ["log_events"]

_NAMES: Final[dict[type[events.Event], tuple[str, Level]]] = {
    events.GroupAdmitted: ("group.admitted", "debug"),
    events.GroupFinished: ("group.finished", "debug"),
    events.GroupHandedBack: ("group.handed_back", "debug"),
    events.GroupSettled: ("group.settled", "debug"),
    events.SampleFailed: ("sample.failed", "warning"),
    events.RequestFinished: ("request.finished", "debug"),
    events.RequestRetried: ("request.retried", "warning"),
    events.RequestAborted: ("request.aborted", "debug"),
    events.WorkerChanged: ("worker.changed", "info"),
    events.WorkerSlept: ("worker.slept", "info"),
    events.WorkerWoken: ("worker.woken", "info"),
    events.EngineStarted: ("engine.started", "info"),
    events.EngineExited: ("engine.exited", "error"),
    events.EngineDoubted: ("engine.doubted", "warning"),
    events.CapabilityWithdrawn: ("engine.capability_withdrawn", "warning"),
    events.EnginesLoading: ("engines.loading", "info"),
    events.ProducerWaiting: ("producer.waiting", "warning"),
    events.GroupsAllFiltered: ("groups.all_filtered", "warning"),
    events.SourceSkips: ("source.skips", "warning"),
    events.GroundTruthMissing: ("ground_truth.missing", "warning"),
    events.TrajectoriesFailing: ("trajectories.failing", "error"),
    events.PauseStarted: ("pause.started", "debug"),
    events.RungReached: ("pause.rung", "debug"),
    events.PauseFinished: ("pause.finished", "info"),
    events.Resumed: ("pause.resumed", "debug"),
    events.WeightsUnconfirmed: ("weights.unconfirmed", "warning"),
    events.WeightsUpdated: ("weights.moved", "debug"),
    events.WeightsProgress: ("weights.progress", "debug"),
    events.WeightUpdateEnded: ("weights.updated", "info"),
    events.BatchTaken: ("batch.taken", "info"),
    events.BatchAcked: ("batch.acked", "debug"),
    events.LeaseExpired: ("batch.lease_expired", "warning"),
    events.MemorySampled: ("memory.sampled", "debug"),
    events.MemoryGrowing: ("memory.growing", "warning"),
    events.MemoryGrowthEnded: ("memory.growth_ended", "info"),
    events.EvaluationStarted: ("evaluation.started", "debug"),
    events.EvaluationFinished: ("evaluation.finished", "info"),
    events.ComponentDied: ("component.died", "error"),
}


_FAILED: Final[Level] = "warning"
"""Of an event that says of itself that it is not `ok`, whatever it is else."""


def log_events(bus: events.EventBus, level: Level = "info") -> None:
    """Write the bus's events to the log, those at `level` or above."""
    log = structlog.get_logger("rollout")
    for kind, (name, at) in _NAMES.items():
        at_failure = max(at, _FAILED, key=LEVELS.index) if any(field.name == "ok" for field in fields(kind)) else at
        if LEVELS.index(at_failure) >= LEVELS.index(level):
            written = LEVELS.index(at) >= LEVELS.index(level)
            bus.subscribe(kind, _writer(getattr(log, at) if written else None, getattr(log, at_failure), name))


def _writer(write: Any, write_failure: Any, name: str) -> Any:
    def handle(event: Any) -> None:
        put = write if getattr(event, "ok", True) else write_failure
        if put is not None:
            put(name, **{field.name: getattr(event, field.name) for field in fields(event) if field.repr})

    return handle
