"""What an engine is to the service: a dialect that builds and reads calls, and a transport that carries them.

Invariants:

- A dialect does no I/O: it builds calls and reads replies; one instance for each worker.
- Parsers raise WorkerFailure or SampleFailure, nothing else.
- A transport makes each call once; who calls bounds it, and tries again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Call, Completion, EngineInfo, EngineProfile, GenerateRequest, Health, Reply
from rollout_svc.engines.endpoint import Endpoint
from rollout_svc.engines.memory import Asleep, Tag
from rollout_svc.errors import WorkerFailure
from rollout_svc.tensors.experts import RawExperts

__all__ = ["Dialect", "StreamReader", "Transport"]


class StreamReader(Protocol):
    """Reads one answer that comes in parts; pure."""

    def feed(self, payload: bytes) -> None:
        """Take the payload of one server-sent event, `[DONE]` included; never raises."""

    def completion(self) -> Completion:
        """Read the whole answer once the stream has ended; raises as `parse_generate`, and where it was cut off."""

    def partial(self) -> Completion | None:
        """What has come so far, as an abort; None where that is nothing, or nothing valid."""


class Transport(Protocol):
    """Carries calls to engines: `engines/http.py` over sockets, the simulator over nothing."""

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Make a generation call; the caller bounds it. Raises WorkerFailure."""

    async def stream(self, endpoint: Endpoint, call: Call, reader: StreamReader) -> Reply:
        """Make a generation call whose answer comes in parts: a status 200 without a body means `reader` has it.

        What came before a WorkerFailure, or before the caller was cancelled, is in `reader` all the same.
        """

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Make one short control attempt, at most `timeout_s` long. Raises WorkerFailure."""

    async def close(self) -> None:
        """Close every connection; idempotent."""


class Dialect(Protocol):
    """Pure translation for one kind of engine; one instance for each worker.

    Parsers raise WorkerFailure or SampleFailure, nothing else.
    """

    name: str

    # -- generation: the wire id is 32 hex characters, new for every call; an engine's own id is derived from it -----

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Call:
        """Build the generation call."""

    def parse_generate(self, reply: Reply) -> Completion:
        """Read its answer."""

    def reader(self) -> StreamReader:
        """Make what reads a streamed answer."""

    def experts_of(self, lifted: Any, request: GenerateRequest) -> RawExperts | None:
        """Name what was lifted from the answer to a request, whole or streamed: its form, and its first row's token.

        None where nothing was lifted: the engine sent none. With tokens and any end but an abort it should have; an
        abort may find a request where there is no routing to send, and its tokens are good without.

        Raises:
            SampleFailure: `experts_invalid`: it is nothing this engine sends.
        """

    def refuses(self, sampling: SamplingConfig) -> str | None:
        """Say which sampling setting this engine cannot do, and why; None when it can do all."""

    # -- what it is ------------------------------------------------------------------------------------------

    def probe(self) -> tuple[Call, ...]:
        """Build the calls that find out what the engine is; they change nothing."""

    def parse_probe(self, replies: Sequence[Reply | WorkerFailure]) -> EngineProfile:
        """Read their answers, in order.

        Raises:
            WorkerFailure: `wrong_dialect` when this is another engine, with what it answered; `unfit` when it was
                started without a switch it needs, naming that; else whatever kept the first call from its answer.
        """

    def info(self) -> Call:
        """Build the call that tells the weight label."""

    def parse_info(self, reply: Reply) -> EngineInfo:
        """Read its answer; raises WorkerFailure."""

    def ping(self) -> Call:
        """Build the cheap probe: it never generates and works while the engine is paused."""

    def parse_ping(self, reply: Reply) -> Health:
        """Read its answer, whatever it is."""

    def loads(self) -> Call:
        """Build the call that counts the engine's own running and waiting requests; for capability `count`."""

    def parse_loads(self, reply: Reply) -> int:
        """Read the count; raises WorkerFailure."""

    # -- control: calls are made one after the other, each checked by `parse_done` ---------------------------

    def abort(self, request_ids: list[str] | None) -> list[Call]:
        """Build the calls that abort these requests, or everything for None."""

    def update_from_disk(self, path: str, version: int, *, flush: bool = True) -> list[Call]:
        """Load weights from a path and label them; `flush`: and drop every cached prefix. For capability `disk`."""

    def forget_load(self, version: int) -> list[Call]:
        """After a load that failed: have what it began not count into the next one. What follows the first may fail."""

    def set_version(self, version: int) -> list[Call]:
        """Label the loaded weights, touching nothing else; empty where the engine has no labels."""

    def freeze(self, cache: Literal["keep", "drop"]) -> list[Call]:
        """Hold everything the engine runs; `cache`: what becomes of its KV cache."""

    def thaw(self) -> list[Call]:
        """Let it go on."""

    def flush_cache(self) -> list[Call]:
        """Drop every cached prefix; empty where the engine has no way to."""

    # -- sleep, for capability `offload` ---------------------------------------------------------------------

    def offloads(self, tags: frozenset[Tag]) -> frozenset[Tag]:
        """What goes when these are to be given up: some engines give up all or nothing."""

    def offload(self, tags: frozenset[Tag]) -> list[Call]:
        """Give up memory, of an idle engine that is wholly awake."""

    def wake(self, tag: Tag) -> list[Call]:
        """Take memory back, one tag after the other in the order of `TAGS`; the last one makes the engine go on."""

    def asleep(self) -> Call:
        """Build the call that tells whether it sleeps."""

    def parse_asleep(self, reply: Reply) -> Asleep | None:
        """Read its answer; None where the engine does not say. Raises WorkerFailure."""

    def parse_done(self, reply: Reply) -> None:
        """Check that a control call succeeded; raises WorkerFailure with the engine's own words."""
