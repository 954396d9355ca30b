"""The record of `GET /v1/stuck`, as `/openapi.json` describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout_svc.gate import Lane
from rollout_svc.rpc.answers import Natural, Record, Seconds
from rollout_svc.sample import SampleStatus
from rollout_svc.stuck import MOST_LISTED, Place

__all__ = ["StuckRecord"]


class StuckSample(Record):
    """One sample under way."""

    sample_id: str
    group_id: str
    task: str | None
    lane: Lane | None
    status: SampleStatus | None
    where: Place
    at: Literal["gate", "tool", "client"] | None
    """Of an agent loop: whether it waits at the gate, runs its own code, or waits for the client of its session."""
    worker: str | None
    judger: str | None
    since_s: Seconds
    """Seconds that it has been there."""
    age_s: Seconds
    """Seconds that a task has had it in this attempt."""
    attempt: int | None
    tokens: Natural | None
    awaits: list[str] | None
    """What its task waits for, outermost first; null for all but the oldest."""


class StuckGroup(Record):
    """One unfinished group that no task has."""

    group_id: str
    task: str
    lane: Lane
    where: Literal["buffered"]
    reason: Literal["gate_closed", "resting", "no_worker", "target_reached", "next"]
    rests_s: Seconds
    since_s: Seconds
    hand_backs: Natural
    samples: dict[SampleStatus, Natural]


class StuckRecord(Record):
    """What has been under way for longer than was asked, oldest first."""

    older_than_s: Seconds
    counts: dict[Place, Natural]
    """How many samples are where, of all of them."""
    samples: Annotated[list[StuckSample], Field(max_length=MOST_LISTED)]
    groups: Annotated[list[StuckGroup], Field(max_length=MOST_LISTED)]
    omitted: Natural
    """Samples that are not listed."""
    groups_omitted: Natural
