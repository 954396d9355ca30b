"""The record of `POST /v1/weights`, as `/openapi.json` describes it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rollout_svc.rpc.answers import Natural, Record

__all__ = ["WeightsUpdated", "WorkerUpdate"]


class WorkerUpdate(BaseModel):
    """What became of one engine: `ok`, and the version it has or why it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ok: bool
    version: int | None = None
    """What it reports now."""
    skipped: str | None = None
    """Why it was left alone."""
    error: str | None = None
    """Why it failed."""
    flushed: bool | None = None
    """False: its cache may still hold what older weights made."""
    confirmed: bool | None = None
    """False: it reports no versions, and was not asked for a known answer: that it has the weights is our word."""
    probed: bool | None = None
    """Whether it gave the known answer; false: it is frozen, and generates nothing."""


class WeightsUpdated(Record):
    """The fleet after an update."""

    version: Natural
    workers: dict[str, WorkerUpdate]
