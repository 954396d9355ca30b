"""What happened, as frozen records; logs, metrics and traces subscribe, the core only emits.

Invariants:

- An event is a value: emitting one decides nothing and nobody downstream can change it.
- A subscriber that raises is reported once per event to the bus's error hook and never reaches the emitter.
- An event type nobody asked for costs one dictionary look-up (`bus.wants`); one that is only counted is never made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout_svc.gate import Lane, Mode

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
    "WeightsUpdated",
    "WorkerChanged",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


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
class WorkerChanged(Event):
    """A worker moved to another state; `incarnation` counts its lives, from 1."""

    worker: str
    before: str
    after: str
    reason: str
    incarnation: int = 1


@dataclass(frozen=True, slots=True)
class EngineStarted(Event):
    """The process of a launched engine was started, for the `starts`-th time."""

    worker: str
    pid: int
    url: str
    log: str
    starts: int


@dataclass(frozen=True, slots=True)
class EngineExited(Event):
    """The process of a launched engine ended by itself; it is started again in a while, or never (None).

    `last_words` are the last lines of its log, of a process that ended before it answered.
    """

    worker: str
    how: str
    log: str
    restart_in_s: float | None
    last_words: str


@dataclass(frozen=True, slots=True)
class EngineDoubted(Event):
    """Something about an engine works, and should not be left so; `path` is the setting it is about."""

    path: str
    message: str


@dataclass(frozen=True, slots=True)
class CapabilityWithdrawn(Event):
    """An engine said that it can do something and did not: it is not believed until it is another process."""

    worker: str
    capability: str
    reason: str


@dataclass(frozen=True, slots=True)
class EnginesLoading(Event):
    """Some engines have not answered yet; told again every few seconds until they have."""

    waiting: dict[str, str]
    answered: int
    elapsed_s: float
    timeout_s: float


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
class WeightsUpdated(Event):
    """An update ended; `odd` names the workers it did not reach, `phases` are seconds, but for `resume`."""

    version: int
    kind: str
    seconds: float
    ok: bool
    odd: tuple[str, ...]
    phases: dict[str, float]


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
class MemorySampled(Event):
    """Memory and disk were looked at, at a step of the trainer's (None: between two).

    By process and account: bytes, and bytes a step where there is a slope yet.
    """

    step: int | None
    accounts: dict[str, dict[str, int]] = field(repr=False)
    slopes: dict[str, dict[str, float]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class MemoryGrowing(Event):
    """An account of a process grows with the steps; told once, and `again` whenever its growth has doubled.

    `of_rss` is its share of the growth of resident memory; None: that does not grow.
    """

    process: str
    account: str
    bytes_per_step: int
    bytes: int
    grown_bytes: int
    since_step: int
    of_rss: float | None
    again: bool
    advice: str


@dataclass(frozen=True, slots=True)
class MemoryGrowthEnded(Event):
    """An account that was told to grow does not any more."""

    process: str
    account: str
    bytes: int
    grown_bytes: int
    since_step: int


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


@dataclass(frozen=True, slots=True)
class ComponentDied(Event):
    """A part that must live as long as the service ended with an error."""

    component: str
    error: str
    traceback: str = field(repr=False)


E = TypeVar("E", bound=Event)


class EventBus:
    """Synchronous fan-out of events to their subscribers."""

    __slots__ = ("_counters", "_on_error", "_subscribers")

    def __init__(self, on_error: Callable[[Event, Exception], None] | None = None) -> None:
        self._subscribers: dict[type[Event], list[Callable[[Any], None]]] = {}
        self._counters: dict[type[Event], list[Callable[..., None]]] = {}
        self._on_error = on_error

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call `handler(event)` for every event of exactly this type."""
        self._subscribers.setdefault(kind, []).append(handler)

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody subscribed to this type: ask before building a costly event."""
        return kind in self._subscribers

    def count(self, kind: type[Event], handler: Callable[..., None]) -> None:
        """Call `handler(*fields)` for every event of this type that is told: for those who only count."""
        self._counters.setdefault(kind, []).append(handler)

    def tell(self, kind: type[Event], *values: Any) -> None:
        """Hand out what comes with every request: as bare fields to those who count, made for those who subscribed."""
        for handler in self._counters.get(kind, ()):
            try:
                handler(*values)
            except Exception as error:  # noqa: BLE001 - as in `emit`
                if self._on_error is not None:
                    self._on_error(kind(*values), error)
        if self.wants(kind):
            self.emit(kind(*values))

    def emit(self, event: Event) -> None:
        """Hand the event to its subscribers, in the order they subscribed."""
        for handler in self._subscribers.get(type(event), ()):
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 - a subscriber's bug must not reach the core
                if self._on_error is not None:
                    self._on_error(event, error)
