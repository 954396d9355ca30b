"""What happened to groups, samples and their requests, and to the supply of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_svc.events.base import Event
from rollout_svc.gate import Lane

__all__ = [
    "GroundTruthMissing",
    "GroupAdmitted",
    "GroupFinished",
    "GroupHandedBack",
    "GroupSettled",
    "GroupsAllFiltered",
    "ProducerWaiting",
    "RequestAborted",
    "RequestFinished",
    "RequestRetried",
    "SampleFailed",
    "SourceSkips",
    "TrajectoriesFailing",
]


@dataclass(frozen=True, slots=True)
class GroupAdmitted(Event):
    """A prompt was admitted as a group."""

    group_id: str
    task: str
    size: int


@dataclass(frozen=True, slots=True)
class GroupFinished(Event):
    """Every member of a group is judged; the group is ready."""

    group_id: str
    task: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupHandedBack(Event):
    """A group went back to the buffer unfinished."""

    group_id: str
    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupSettled(Event):
    """A group reached its outcome for good."""

    group_id: str
    task: str
    outcome: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class SampleFailed(Event):
    """One attempt of a sample failed; `final` when its attempts are used up."""

    sample_id: str
    task: str
    reason: str
    message: str
    failures: int
    final: bool


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """An engine answered a call."""

    sample_id: str
    worker: str
    lane: Lane
    seconds: float
    tokens: int
    finish_reason: str
    late: bool


@dataclass(frozen=True, slots=True)
class RequestRetried(Event):
    """A call failed by its worker's doing and will be tried again."""

    sample_id: str
    worker: str | None
    kind: str
    attempt: int
    sleep_s: float


@dataclass(frozen=True, slots=True)
class RequestAborted(Event):
    """A call was cancelled by us before its answer was whole."""

    sample_id: str
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProducerWaiting(Event):
    """The producer cannot start anything, and why; emitted when the reason changes."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class GroupsAllFiltered(Event):
    """So many groups of a task in a row were filtered, and none was kept; told again whenever the number doubles."""

    task: str
    in_a_row: int
    reason: str


@dataclass(frozen=True, slots=True)
class SourceSkips(Event):
    """A source that cannot be set to a position reads again what was used up before a restart, and drops it."""

    task: str
    lines: int


@dataclass(frozen=True, slots=True)
class GroundTruthMissing(Event):
    """A prompt without a ground truth was written to the trajectories; told once per task."""

    task: str
    prompt_id: str


@dataclass(frozen=True, slots=True)
class TrajectoriesFailing(Event):
    """Trajectories cannot be written, or not be set aside; told once until it works again. `failed`: lines lost."""

    path: str
    error: str
    failed: int
