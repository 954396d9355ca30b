"""The records of the control API, as `/openapi.json` describes them.

Invariants:

- Nothing is built of these: the parts write their own records (`as_json`). Tests and the fuzzer hold every answer of a
  live service against them, so a key that is missing here, or is too much, is found.
- They are closed: the document describes exactly the service that hands it out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_svc.config import Dialect, Strategy
from rollout_svc.gate import Lane
from rollout_svc.rpc.record import Natural, Record, Seconds
from rollout_svc.rpc.session_answer import SessionsRecord
from rollout_svc.service import State
from rollout_svc.weights.phases import Phase
from rollout_svc.workers.worker import WorkerState

__all__ = [
    "Accepted",
    "AccountBook",
    "Acked",
    "Checkpointed",
    "Document",
    "GrowthRecord",
    "Health",
    "Natural",
    "Plan",
    "Record",
    "Removed",
    "Seconds",
    "Status",
    "WorkerRecord",
    "Workers",
]


class Health(Record):
    """Where the service stands."""

    state: State


class Book(Record):
    """Accounts whose sum is `admitted`."""

    admitted: Natural
    queued: Natural
    in_flight: Natural
    aborted: Natural
    ready: Natural
    leased: Natural
    consumed: Natural
    filtered: Natural
    expired: Natural
    failed: Natural


class AccountBook(Record):
    """Every group and sample of a lane, in exactly one account."""

    groups: Book
    samples: Book
    late_discarded: Natural
    """Writes that came with a revoked attempt."""
    redone: Natural
    """Samples that were begun again after a failure."""


class Plan(Record):
    """The concurrency in force."""

    workers: Natural
    required: Natural
    """Requests each worker should be running."""
    allowed: Natural
    """Requests a worker may be running: the smallest limit of all."""
    ratio: float
    """Requests allowed, as a multiple of what the smallest worker runs at once."""
    max_groups: Natural
    """Groups that may be admitted and not yet consumed."""
    warnings: list[str]
    """What was adjusted, with the numbers before and after."""


class LaneRecord(Record):
    """One lane."""

    open: bool
    in_flight: Natural
    parked: Natural


class ProcessRecord(Record):
    """The process of an engine that the service launched."""

    pid: Natural | None
    """Null: none runs now."""
    starts: Natural
    log: str
    """Where everything it says is kept."""


class WorkerRecord(Record):
    """One engine, as the service sees it."""

    id: str
    url: str
    dialect: Dialect
    state: WorkerState
    incarnation: Natural
    """Its lives, from 1: another after each death, and when it is found restarted."""
    reason: str
    in_flight: Natural
    tokens_in_flight: Natural
    """Prompt tokens of what is in flight, and those it may still make."""
    limit: Natural
    capabilities: list[str]
    engine_version: str | None
    """What the engine calls its own version; null: it was not asked yet, or does not say."""
    model: str | None
    """What it serves."""
    weight_version: int | None
    """What it reports; null: nothing, or it was not asked yet."""
    frozen: bool
    asleep: list[str]
    """The memory its engine gave up: `weights`, `kv_cache`."""
    process: ProcessRecord | None
    """Null: somebody else started it."""
    engines: list[str] | None
    """The engines behind it where it is a router; else null."""


class LeaseRecord(Record):
    """A batch that the trainer has and has not acknowledged."""

    batch_id: str
    step: Natural
    groups: Natural


class BufferRecord(Record):
    """What waits for the trainer."""

    ready: Natural
    unfinished: Natural
    bytes: Natural
    """Encoded samples of finished groups, ready and leased, and their routed experts."""
    leases: list[LeaseRecord]


class TensorsRecord(Record):
    """Heavy tensors of one kind."""

    handles: Natural
    """Those that are alive: each has one owner."""
    bytes: Natural
    """Of those."""
    lost: Natural
    """Those that their owners have forgotten: none, unless something is wrong."""


class TailRecord(Record):
    """What expired or was aborted again and again, and goes first in rounds."""

    gathered: int
    """Groups and prompts that wait for a round."""
    left: int
    """Those of the round under way that have not been started."""
    round: bool
    """Whether a round is under way."""


class ScheduleRecord(Record):
    """How much may be under way, and is."""

    strategy: Strategy
    next_step: int
    """The step the next batch is made for."""
    window: int
    """Batches that tokens made now can still serve."""
    limit: int
    """Groups that may be out: admitted, and neither leased nor settled."""
    out: int
    """Groups that are."""
    tail: TailRecord


class TaskRecord(Record):
    """One task's part in the mix: groups by where they are."""

    admitted: Natural
    out: Natural
    """Admitted, and neither settled nor leased."""
    ready: Natural
    leased: Natural
    consumed: Natural
    share: float
    """Of a batch, by the tasks' weights."""
    waiting_for: str
    """Why no prompt of it can be admitted; empty: one can, where there is room."""


class SourceRecord(Record):
    """Where the prompts of one task come from."""

    used: Natural
    """Lines used up, since the beginning of the source."""
    epoch: Natural | None
    """Passes over a file that were begun; null: it has none."""
    exhausted: bool
    known_ids: Natural | None
    """Ids that are not accepted again; null: nothing is pushed here."""


class ProducerRecord(Record):
    """What the producing loop does."""

    waiting_for: str
    """Empty while it starts work."""
    exhausted: bool
    no_worker_s: float | None
    """Seconds for which no worker has been in traffic; null: one is, or none is missed."""
    schedule: ScheduleRecord | None
    """How much may be under way; null: there is no plan yet."""
    tasks: dict[str, TaskRecord]
    filtered_in_a_row: dict[str, Natural]
    """By task: groups that were filtered since one was kept."""
    sources: dict[str, SourceRecord]


class TrajectoriesRecord(Record):
    """What was written down of finished groups."""

    path: str
    written: Natural
    failed: Natural
    """Lines that were lost."""
    bytes: Natural


class EvaluationsRecord(Record):
    """Lane `eval`."""

    under_way: Natural
    """Evaluations that have not been answered."""
    in_flight: Natural
    """Their requests at engines."""
    waiting: Natural
    """Their prompts that nobody works for."""
    max_in_flight: Natural
    ledger: AccountBook
    """Each prompt is a group of one sample."""


class GrowthRecord(Record):
    """An account that grows with the trainer's steps."""

    process: str
    account: str
    bytes_per_step: int
    bytes: Natural
    grown_bytes: Natural
    """Since that step."""
    since_step: int
    """Where it began, as far as that can be told."""
    of_rss: float | None
    """Its share of the growth of resident memory; null: that does not grow."""


class MemoryBrief(Record):
    """Whether memory, or a file, grows with the steps."""

    verdict: str
    """One line for people."""
    growing: list[GrowthRecord]


class WeightsRecord(Record):
    """The fleet's weights, and the update that is under way, or was the last."""

    version: Natural
    state: Literal["idle", "updating"]
    phase: Phase | None
    """The one under way; null: none, or between two."""
    phases_s: dict[Phase, Seconds]
    """Those that took place."""
    buckets: Natural
    """How many every engine has."""
    bytes: Natural
    """Of those."""
    total_bytes: Natural | None
    """Of all that will come; null: nobody said."""
    seconds: Seconds
    """Since it began, or all that it took."""
    error: str
    """Whom the last one did not reach, and why; empty: it reached all, or is under way."""


class ShardRecord(Record):
    """One producer shard."""

    id: str
    state: Literal["in_step", "held"]
    """`held`: it is out of step, and does nothing until it is brought back."""
    reason: str
    """Why it is held."""
    life: Natural | None
    """How often it was started, when it was last in step; null: it never was."""
    again_in_s: float | None = None
    """Seconds until a shard that could not be made is tried again by itself; null: it is not, or need not be."""


class Status(Record):
    """The service's record of itself."""

    state: State
    ticket: Natural
    """The number of the last pause."""
    weight_version: Natural
    """Trainer steps whose weights the fleet has."""
    weights: WeightsRecord
    lanes: dict[Lane, LaneRecord]
    workers: list[WorkerRecord]
    buffer: BufferRecord
    producer: ProducerRecord
    tensors: dict[str, TensorsRecord]
    """By kind (`experts`, …); empty where there never was one."""
    trajectories: TrajectoriesRecord | None
    """Null: none are kept."""
    judges: dict[str, dict[str, Any]]
    """By judger: counts, seconds in line and running, and the slowest samples."""
    evaluations: EvaluationsRecord
    sessions: SessionsRecord
    ledger: AccountBook
    plan: Plan
    rss_bytes: Natural
    memory: MemoryBrief
    shards: list[ShardRecord] = Field(default=[])
    """There only where there are several."""


class Workers(Record):
    """The fleet."""

    workers: list[WorkerRecord]


class Removed(Record):
    """An engine on its way out."""

    id: str
    state: Literal["DRAINING"]


class Acked(Record):
    """A batch that is consumed for good."""

    batch_id: str
    acknowledged: Literal[True]


class Checkpointed(Record):
    """A snapshot that was written."""

    path: str
    """Where, from the root of the service's machine."""
    step: Natural
    bytes: Natural
    """Of the file."""
    groups: Natural
    """Groups in it: admitted and not settled."""
    samples: Natural
    seconds: Seconds
    ack_expired: list[str] = Field(default=[])
    """Batches whose ack came too late; there only where there are some."""


class Accepted(Record):
    """How many prompts were new."""

    accepted: Natural


class Document(BaseModel):
    """An OpenAPI document."""

    model_config = ConfigDict(frozen=True, extra="allow")

    openapi: Literal["3.1.0"]
    paths: dict[str, Any]
