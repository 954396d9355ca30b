"""The record of a pause, as `/openapi.json` describes it: what it found and did."""

from __future__ import annotations

from pydantic import Field

from rollout_svc.config import PauseMode
from rollout_svc.rpc.answers import AccountBook
from rollout_svc.rpc.record import Natural, Record, Seconds

__all__ = ["Report"]


class Rung(Record):
    """A rung of the ladder that was reached."""

    name: str
    at_s: Seconds
    pending: Natural


class Tally(Record):
    """One worker over one pause."""

    in_flight: Natural
    answered: Natural
    late: Natural
    cancelled: Natural
    abandoned: Natural
    residual: Natural | None
    """The engine's own count less other lanes' requests; null: it cannot be had."""
    uncounted: list[str] = Field(default=[])
    """Engines behind a router that could not count; there only where there are some."""


class AbandonedRecord(Record):
    """What still runs."""

    sample_id: str | None
    worker: str | None
    age_s: Seconds


class Report(Record):
    """What a pause found and did."""

    ticket: Natural
    mode: PauseMode
    clean: bool
    """Nothing is abandoned."""
    elapsed_s: Seconds
    rungs: list[Rung]
    workers: dict[str, Tally]
    parked: list[str]
    abandoned: list[AbandonedRecord]
    ledger: AccountBook
    offloaded: dict[str, list[str]]
    """By worker, the memory its engine gave up."""
    not_offloaded: dict[str, str]
    """By worker, why it did not give up what was asked for."""
