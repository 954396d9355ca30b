"""What passes between the service and a dialect: plain records, no HTTP library in sight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.endpoint import Endpoint
from rollout_svc.segment import FinishReason, VersionSpan

__all__ = ["Call", "Completion", "Dialect", "EngineInfo", "GenerateRequest", "Reply", "Transport"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call to make: method, path below the worker's url, encoded JSON body, and which key it needs."""

    method: str
    path: str
    body: bytes | None = None
    admin: bool = False


class Reply(NamedTuple):
    """What came back: status, the body's bytes, and `Retry-After` in seconds where it was sent."""

    status: int
    body: bytes
    retry_after_s: float | None = None


@dataclass(slots=True)
class GenerateRequest:
    """One engine call.

    Attributes:
        request_id: the wire id, fixed width, new for every call.
        input_ids: prompt and prefix, token ids; or the JSON they were written as, once for all tries.
        max_tokens: what may still be generated, at least 1.
        sampling: the rest of the sampling settings.
        seed: of this sample's draws, or None.
        extra: opaque top-level keys from the prompt line.
    """

    request_id: str
    input_ids: list[int] | orjson.Fragment
    max_tokens: int
    sampling: SamplingConfig
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Completion:
    """A valid answer to one call.

    Attributes:
        ids: new token ids only, never the prefix.
        logprobs: one natural-log probability for each.
        finish_reason: in our words.
        engine_finish_reason: in the engine's.
        spans: weight versions over `ids`; None where the label is no integer or the engine reports none.
        request_id: the wire id the engine says this answers; None where it does not say.
        labelled: the engine said which weights it has; a label that is no integer is version None.
        late: the lane's epoch closed before this was parsed.
        worker: id of the worker that answered.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    engine_finish_reason: str
    spans: tuple[VersionSpan, ...]
    request_id: str | None = None
    labelled: bool = False
    late: bool = False
    worker: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself: its weight label as sent, and what its dialect can do with it."""

    weight_label: str | None
    capabilities: tuple[str, ...] = ()

    @property
    def weight_version(self) -> int | None:
        """The version the label means; None for labels that are no integer (a fresh SGLang says `default`)."""
        try:
            return None if self.weight_label is None else int(self.weight_label)
        except ValueError:
            return None


class Transport(Protocol):
    """Carries calls to engines: `engines/http.py` over sockets, the simulator over nothing."""

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call; the caller bounds it. Raises WorkerFailure."""

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make one short control attempt, at most `timeout_s` long. Raises WorkerFailure."""

    async def close(self) -> None:
        """Close every connection; idempotent."""


class Dialect(Protocol):
    """Pure translation for one kind of engine. Parsers raise WorkerFailure or SampleFailure, nothing else."""

    name: str

    def generate(self, request: GenerateRequest) -> Call:
        """Build the generation call."""

    def parse_generate(self, reply: Reply) -> Completion:
        """Read its answer."""

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """Build the calls that abort these requests, or everything for None."""

    def ping(self) -> Call:
        """Build the cheap liveness probe: it never generates and works while the engine is paused."""

    def info(self) -> Call:
        """Build the call that tells the weight label."""

    def parse_info(self, reply: Reply) -> EngineInfo:
        """Read its answer; raises WorkerFailure."""

    def loads(self) -> Call:
        """Build the call that counts the engine's own running and waiting requests."""

    def parse_loads(self, reply: Reply) -> int:
        """Read the count; raises WorkerFailure."""

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> Call:
        """Build the call that loads weights from a path and labels them; `flush`: and drops every cached prefix."""

    def set_version(self, version: int) -> Call:
        """Build the call that labels the loaded weights, touching nothing else."""

    def freeze(self, cache: Literal["keep", "drop"]) -> Call:
        """Build the call that holds everything the engine runs; `cache`: what becomes of its KV cache."""

    def thaw(self) -> Call:
        """Build the call that lets it go on."""

    def flush_cache(self) -> Call:
        """Build the call that drops every cached prefix."""

    def parse_done(self, reply: Reply) -> None:
        """Check that a control call succeeded; raises WorkerFailure with the engine's own words."""
