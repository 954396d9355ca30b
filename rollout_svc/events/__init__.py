"""What happened, as frozen records; logs, metrics and traces subscribe, the core only emits.

Invariants:

- An event is a value: emitting one decides nothing and nobody downstream can change it.
- A subscriber that raises is reported once per event to the bus's error hook and never reaches the emitter.
- An event type nobody asked for costs one dictionary look-up (`bus.wants`); one that is only counted is never made.
"""

from __future__ import annotations

from rollout_svc.events.base import Event
from rollout_svc.events.batches import BatchAcked, BatchTaken, EvaluationFinished, EvaluationStarted, LeaseExpired
from rollout_svc.events.bus import EventBus
from rollout_svc.events.control import (
    PauseFinished,
    PauseStarted,
    Resumed,
    RungReached,
    WeightsProgress,
    WeightsUnconfirmed,
    WeightsUpdated,
    WeightUpdateEnded,
)
from rollout_svc.events.engines import (
    CapabilityWithdrawn,
    EngineDoubted,
    EngineExited,
    EnginesLoading,
    EngineStarted,
    WorkerChanged,
    WorkerSlept,
    WorkerWoken,
)
from rollout_svc.events.health import ComponentDied, MemoryGrowing, MemoryGrowthEnded, MemorySampled
from rollout_svc.events.samples import (
    GroundTruthMissing,
    GroupAdmitted,
    GroupFinished,
    GroupHandedBack,
    GroupsAllFiltered,
    GroupSettled,
    ProducerWaiting,
    RequestAborted,
    RequestFinished,
    RequestRetried,
    SampleFailed,
    SourceSkips,
    TrajectoriesFailing,
)

__all__ = [
    "BatchAcked",
    "BatchTaken",
    "CapabilityWithdrawn",
    "ComponentDied",
    "EngineDoubted",
    "EngineExited",
    "EngineStarted",
    "EnginesLoading",
    "EvaluationFinished",
    "EvaluationStarted",
    "Event",
    "EventBus",
    "GroundTruthMissing",
    "GroupAdmitted",
    "GroupFinished",
    "GroupHandedBack",
    "GroupSettled",
    "GroupsAllFiltered",
    "LeaseExpired",
    "MemoryGrowing",
    "MemoryGrowthEnded",
    "MemorySampled",
    "PauseFinished",
    "PauseStarted",
    "ProducerWaiting",
    "RequestAborted",
    "RequestFinished",
    "RequestRetried",
    "Resumed",
    "RungReached",
    "SampleFailed",
    "SourceSkips",
    "TrajectoriesFailing",
    "WeightUpdateEnded",
    "WeightsProgress",
    "WeightsUnconfirmed",
    "WeightsUpdated",
    "WorkerChanged",
    "WorkerSlept",
    "WorkerWoken",
]
