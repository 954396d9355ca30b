"""One pause report of several. Pure.

Invariants:

- Every shard is in it: with what it reported, or, where it did not acknowledge, with each of its workers as abandoned.
- It is clean exactly when every shard acknowledged, and reported that nothing is abandoned.
- A rung is as late as in the shard that reached it last, and has pending what all of them had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_svc.pause.report import Abandoned, PauseReport, RungRecord, WorkerTally
from rollout_svc.sharding.naming import joined, named

__all__ = ["Silence", "merge_reports"]


@dataclass(frozen=True, slots=True)
class Silence:
    """A shard that did not acknowledge a pause.

    Attributes:
        age_s: seconds for which nothing has been heard of it.
        in_flight: requests at each of its workers, by the shard's own names, when it was last heard of.
    """

    age_s: float
    in_flight: Mapping[str, int] = field(default_factory=dict)


def merge_reports(
    ticket: int,
    mode: str,
    elapsed_s: float,
    reports: Mapping[str, Mapping[str, Any]],
    silent: Mapping[str, Silence],
    ledger: dict[str, Any],
) -> PauseReport:
    """Make the report of a pause from those of the shards.

    Args:
        ticket: the coordinator's.
        mode: that was asked for.
        elapsed_s: seconds it took.
        reports: the records of those that acknowledged, by shard.
        silent: those that did not.
        ledger: of all shards.
    """
    workers: dict[str, WorkerTally] = {}
    abandoned: list[Abandoned] = []
    for shard, report in reports.items():
        workers |= named(shard, {name: _tally(record) for name, record in report["workers"].items()})
        abandoned += [_abandoned(shard, record) for record in report["abandoned"]]
    for shard, silence in silent.items():
        for name, number in silence.in_flight.items():
            workers[joined(shard, name)] = WorkerTally(in_flight=number, abandoned=number)
        places = [joined(shard, name) for name in silence.in_flight] or [shard]
        abandoned += [Abandoned(None, place, silence.age_s) for place in places]
    return PauseReport(
        ticket=ticket,
        mode=mode,
        elapsed_s=elapsed_s,
        rungs=_rungs(report["rungs"] for report in reports.values()),
        workers=workers,
        parked=[sample for report in reports.values() for sample in report["parked"]],
        abandoned=abandoned,
        ledger=ledger,
        offloaded=_by_worker(reports, "offloaded"),
        not_offloaded=_by_worker(reports, "not_offloaded"),
    )


def _by_worker(reports: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: told for shard, report in reports.items() for name, told in named(shard, report.get(key, {})).items()}


def _tally(record: Mapping[str, Any]) -> WorkerTally:
    return WorkerTally(**{**record, "uncounted": tuple(record.get("uncounted", ()))})


def _abandoned(shard: str, record: Mapping[str, Any]) -> Abandoned:
    worker = record["worker"]
    return Abandoned(record["sample_id"], None if worker is None else joined(shard, worker), record["age_s"])


def _rungs(ladders: Iterable[Iterable[Mapping[str, Any]]]) -> list[RungRecord]:
    reached: dict[str, tuple[float, int]] = {}
    for ladder in ladders:
        last = {rung["name"]: rung for rung in ladder}  # one that was reached twice is as its last time
        for name, rung in last.items():
            at_s, pending = reached.get(name, (0.0, 0))
            reached[name] = max(at_s, rung["at_s"]), pending + rung["pending"]
    ordered = sorted(reached.items(), key=lambda item: item[1][0])
    return [RungRecord(name, at_s, pending) for name, (at_s, pending) in ordered]
