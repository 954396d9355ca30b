"""What happened to the service itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from traceback import format_exception
from typing import Self

from rollout_svc.events.base import Event

__all__ = ["ComponentDied", "MemoryGrowing", "MemoryGrowthEnded", "MemorySampled"]


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
class ComponentDied(Event):
    """A part that must live as long as the service ended with an error."""

    component: str
    error: str
    traceback: str = field(repr=False)

    @classmethod
    def of(cls, component: str, error: BaseException) -> Self:
        """Make the event of what a part ended with."""
        return cls(component, f"{type(error).__name__}: {error}", "".join(format_exception(error)))
