"""What happened to engines and their workers."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_svc.events.base import Event

__all__ = [
    "CapabilityWithdrawn",
    "EngineDoubted",
    "EngineExited",
    "EngineStarted",
    "EnginesLoading",
    "WorkerChanged",
    "WorkerSlept",
    "WorkerWoken",
]


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
class WorkerSlept(Event):
    """An engine was asked for memory: what it has given up now, and why that is not what was asked for."""

    worker: str
    tags: tuple[str, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class WorkerWoken(Event):
    """An engine was asked to take memory back: what it had given up, what is still away, and why."""

    worker: str
    before: tuple[str, ...]
    tags: tuple[str, ...]
    reason: str | None
