"""The bodies of the control API, as strict models: what they refuse is a 400 with the path of the field.

Invariant: a body that passed is a value; nothing in it is shared with the service's own settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollout_svc.config import Listed, WorkerConfig
from rollout_svc.gate import LANES, Lane

__all__ = ["Ack", "Batch", "Concurrency", "Pause", "Prompts", "Resume", "Stuck", "Weights", "Worker"]

DeadlineS = Annotated[float, Field(gt=0, le=86_400)]
Version = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Pause(Body):
    """`POST /v1/pause`."""

    mode: Literal["abort", "wait", "keep"] | None = None
    deadline_s: DeadlineS | None = None
    lanes: Listed[Lane] = LANES
    if_ticket: int | None = None
    kv: Literal["keep", "drop"] = "keep"
    offload: Listed[str] = ()

    @field_validator("lanes")
    @classmethod
    def _some(cls, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        """Refuse none; a length on the field would count an unknown lane as missing and complain twice."""
        if not lanes:
            raise ValueError(f"expected some of {', '.join(LANES)}")
        return lanes


class Stuck(Body):
    """`GET /v1/stuck`, its query: words of an address, so numbers come as text."""

    model_config = ConfigDict(strict=False)

    older_than_s: Annotated[float, Field(ge=0)] | None = None


class Resume(Body):
    """`POST /v1/resume`."""

    ticket: int | None = None
    weight_version: Version | None = None


class Batch(Body):
    """`POST /v1/batches`."""

    step: Annotated[int, Field(ge=0)]
    groups: Annotated[int, Field(ge=1, le=1_000_000)]
    timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    ack: Listed[str] = ()


class Ack(Body):
    """`POST /v1/batches/{id}/ack`: nothing to say."""


class Prompts(Body):
    """`POST /v1/prompts`."""

    task: str
    prompts: list[dict[str, Any]]


class WeightSource(Body):
    """Where new weights come from."""

    kind: str
    path: str | None = None
    workers: Listed[str] | None = None


class Weights(Body):
    """`POST /v1/weights`."""

    version: Version
    source: WeightSource
    pause: Pause | None = None


class Concurrency(Body):
    """`PUT /v1/concurrency`: one of the two, or both."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, Annotated[int, Field(ge=1, le=1_000_000)]] = Field(default_factory=dict)


class Worker(WorkerConfig):
    """`POST /v1/workers`: the same keys as in the configuration."""
