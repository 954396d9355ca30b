"""The service's view of one engine: its state, its limit, and what it runs for us.

Invariants:

- A call is in `calls` from the line that claims its slot to the line that gives it back, and so are its `tokens`;
  nothing else counts.
- There is a `free` slot only in state ACTIVE, not frozen, below the limit, with the breaker letting traffic through.
- The state changes in `become` alone, which tells its listener; DRAINING is the last.
- A capability that was withdrawn stays so for as long as the process there may be the same: what it says of itself
  when it is asked again brings nothing back.
- The incarnation rises when it comes back from DEAD, or is found restarted: what an older one held is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

from rollout_svc.engines import Dialect, Endpoint, EngineInfo, EngineProfile
from rollout_svc.errors import WorkerFailure
from rollout_svc.gate import LANES, Lane
from rollout_svc.tensors.layouts import filled
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.call import AbortReason, CallEnded, EngineCall
from rollout_svc.workers.conditions import Cache, Freeze, Quarantine, Sleep, WorkerState
from rollout_svc.workers.launched import Launched

__all__ = [
    "AbortReason",
    "Cache",
    "CallEnded",
    "EngineCall",
    "Freeze",
    "Quarantine",
    "Sleep",
    "Worker",
    "WorkerState",
]

_SINGLE_ABORTS: Final = 4  # at once, of the 8 control connections a worker has at most: for calls that were dropped


class Worker:
    """One engine as the pool sees it; see the module's invariants."""

    __slots__ = (
        "_on_change",
        "active_since",
        "answered",
        "answered_before",
        "asleep",
        "attention",
        "breaker",
        "calls",
        "candidates",
        "contradiction",
        "dialect",
        "endpoint",
        "engines",
        "exclusive",
        "flushed",
        "freeze",
        "freeze_until",
        "half_loaded",
        "held",
        "in_flight",
        "incarnation",
        "launched",
        "limit",
        "loading",
        "max_batch",
        "monitor_until",
        "probe_failures",
        "process",
        "profile",
        "quarantine",
        "reason",
        "refusal",
        "refusals",
        "residual",
        "single_aborts",
        "state",
        "stream",
        "switching",
        "thaw_until",
        "tokens",
        "trial",
        "turn",
        "unsure",
        "version",
        "weights_lost",
        "withdrawn",
        "worker_id",
    )

    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: Endpoint,
        engines: tuple[Endpoint, ...] = (),
        candidates: tuple[Dialect, ...],
        max_batch: int | None,
        exclusive: bool,
        stream: bool,
        breaker: Breaker,
        on_change: Callable[[Worker, WorkerState, WorkerState, str], None],
    ) -> None:
        self.worker_id = worker_id
        self.endpoint = endpoint
        self.engines = engines or (endpoint,)
        self.candidates = candidates
        self.dialect = candidates[0]
        self.profile: EngineProfile | None = None
        self.max_batch = max_batch
        self.exclusive = exclusive
        self.stream = stream
        self.breaker = breaker
        self.limit = 0
        self.state = WorkerState.STARTING
        self.reason = "not reached yet"
        self.calls: dict[str, EngineCall] = {}
        self.in_flight: dict[Lane, int] = dict.fromkeys(LANES, 0)  # how many of them, by lane
        self.tokens = 0  # of its calls: what they were given, and what they may still make
        self.turn = 0  # when it was last chosen, where the policy takes turns
        self.version: int | None = None
        self.process: str | None = None
        self.active_since = 0.0
        self.flushed: int | None = None
        self.single_aborts = asyncio.Semaphore(_SINGLE_ABORTS)
        self.answered = 0
        self.answered_before = 0  # at the last ping
        self.incarnation = 1
        self.probe_failures = 0
        self.refusals = 0
        self.refusal: WorkerFailure | None = None  # what it said when it was first asked, if that was no
        self.withdrawn: dict[str, str] = {}  # capabilities it said it has, and why that is not believed
        self.residual: int | None = None
        self.quarantine: Quarantine | None = None
        self.held = False
        self.trial: asyncio.Event | None = None  # set when its canary is over; it is in no count before it arrives
        self.freeze: Freeze | None = None
        self.freeze_until = 0.0  # loop time until which a freeze that was given up may still arrive
        self.thaw_until = 0.0  # likewise a thaw
        self.switching = asyncio.Lock()
        self.asleep: Sleep | None = None
        self.weights_lost = False  # it gave its weights up without keeping them
        self.monitor_until = 0.0  # loop time until which its monitor may say what held while it slept
        self.half_loaded = False  # an update ended there between two versions
        self.contradiction: str | None = None  # what it generates is not what its weights make
        self.loading = False  # weights are on their way: what is frozen there must not go on
        self.unsure = False
        self.launched: Launched | None = None
        self.attention = asyncio.Event()
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<Worker {self.worker_id} {self.state} {len(self.calls)}/{self.limit} v{self.version}>"

    @property
    def free(self) -> int:
        """How many new requests may be sent now."""
        if self.state is not WorkerState.ACTIVE or self.held or self.unsure or self.freeze or self.asleep:
            return 0
        breaker = self.breaker
        limit = self.limit if breaker.state == "closed" or breaker.proved else min(1, self.limit)
        return max(0, limit - len(self.calls))

    @property
    def accepts(self) -> bool:
        """Whether one may."""
        return self.free > 0

    @property
    def absent(self) -> bool:
        """Whether it is launched and its process does not run: who answers at its address is somebody else."""
        return self.launched is not None and self.launched.pid is None

    @property
    def frozen(self) -> bool:
        """Whether its engine confirmed that nothing runs there for now, and was not told to go on."""
        return self.freeze is not None and self.freeze.confirmed and not self.freeze.thawing

    @property
    def standing(self) -> bool:
        """Whether the time limits of its calls stand still: frozen, and not known to go on yet."""
        return self.freeze is not None and self.freeze.confirmed

    @property
    def weightless(self) -> bool:
        """Whether its engine has given its weights up, or may have: there is nothing to load into."""
        return self.asleep is not None and ("weights" in self.asleep.tags or not self.asleep.certain)

    @property
    def keeps_cache(self) -> bool:
        """Whether requests are frozen there whose KV cache was asked to stay."""
        return self.frozen and bool(self.calls) and self.freeze is not None and self.freeze.cache == "keep"

    @property
    def front(self) -> Endpoint | None:
        """What stands in front of its engines and is sent the generations; None where nothing does."""
        return None if self.endpoint in self.engines else self.endpoint

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What its engine can do; nothing while it has not said."""
        return () if self.profile is None else self.profile.capabilities

    @property
    def labels(self) -> bool:
        """Whether its engine reports weight versions; else what it has is what we know we gave it."""
        return "weight_version" in self.capabilities

    def introduce(self, dialect: Dialect, profile: EngineProfile) -> None:
        """It said what it is: it is spoken to so from now on.

        What it does not say of its model's routing any more, since its weights lie elsewhere now, it said before.
        """
        before = self.profile
        label = EngineInfo(profile.weight_label)
        if label.weight_label is not None and self.version not in (None, label.weight_version):
            self.withdrawn.clear()  # it was restarted, or given weights by somebody: let it show what it can
        if before is not None and before.experts is not None:
            profile = replace(profile, experts=filled(profile.experts, before.experts))
        self.dialect, self.profile, self.refusal = dialect, self._believed(profile), None

    def _believed(self, profile: EngineProfile) -> EngineProfile:
        if self.withdrawn.keys().isdisjoint(profile.capabilities):
            return profile
        left = tuple(name for name in profile.capabilities if name not in self.withdrawn)
        return replace(profile, capabilities=left)

    def withdraw(self, capability: str, reason: str) -> bool:
        """Take back what its engine said it can do; returns whether that is new."""
        if capability in self.withdrawn:
            return False
        self.withdrawn[capability] = reason
        if self.profile is not None:
            self.profile = self._believed(self.profile)
        return True

    def turn_away(self, reason: str) -> None:
        """Keep it out as an engine that cannot be used as it was started; it is asked again and again."""
        self.refusal = WorkerFailure("unfit", reason, hard=True)
        self.breaker.trip(asyncio.get_running_loop().time())
        self.become(WorkerState.RECOVERING, str(self.refusal))

    def is_same(self, info: EngineInfo) -> bool:
        """Whether the process there is certainly the one that was let in."""
        return info.process is not None and info.process == self.process

    def meet(self, info: EngineInfo) -> None:
        """Take note of which process is there; what another one without labels has, nobody knows.

        One that was out and cannot say which it is may be another. What it has is then what an update gave it since.
        """
        waited = self.quarantine is not None and self.quarantine.kind == "version"
        fresh = self.labels and info.weight_label is not None and info.weight_version is None and not info.half_loaded
        if info.process != self.process or fresh:  # every engine that was let in has a number for its label
            self.half_loaded, self.contradiction = False, None
        if not self.labels and (info.process != self.process or (info.process is None and not waited)):
            self.version = None
        self.process = info.process

    def thawed(self, now: float) -> None:
        """It goes on: the time limits of what it held start counting again."""
        if self.freeze is not None:
            for call in self.calls.values():
                call.held_s += now - self.freeze.since
            self.freeze = None

    def awake(self, monitor_until: float) -> None:
        """It has all its memory again, whatever its monitor says until then."""
        self.asleep, self.monitor_until = None, monitor_until
        self.attention.set()

    def heard(self) -> None:
        """Its engine answered, whatever it said."""
        if self.launched is not None and self.launched.pid is not None:
            self.launched.answered = True

    def renewed(self, now: float) -> None:
        """Its process has ended: neither frozen nor at fault, and no freeze on its way will reach anybody."""
        self.thawed(now)
        self.freeze_until = self.thaw_until = self.monitor_until = 0.0
        self.asleep, self.weights_lost = None, False
        self.residual = self.flushed = None
        self.half_loaded, self.contradiction = False, None
        self.withdrawn.clear()
        self.breaker.succeeded()

    def move(self, url: str) -> None:
        """It is found at another address from now on."""
        self.endpoint = self.endpoint.moved(url)
        self.engines = (self.endpoint,)

    def count(self, lanes: frozenset[Lane]) -> int:
        """How many calls of these lanes are under way."""
        return sum(self.in_flight[lane] for lane in lanes)

    def in_lanes(self, lanes: frozenset[Lane]) -> list[EngineCall]:
        """Calls of these lanes under way."""
        return [call for call in self.calls.values() if call.lane in lanes]

    def put_in_quarantine(self, kind: Literal["residual", "version"], reason: str) -> None:
        """Keep it from traffic until what `kind` asks for is shown; one that is in force keeps its age."""
        if self.state is WorkerState.DRAINING:
            return
        if self.quarantine is None or self.quarantine.kind != kind:
            self.quarantine = Quarantine(kind, asyncio.get_running_loop().time())
        self.become(WorkerState.QUARANTINED, reason)

    def restarted(self, reason: str) -> None:
        """It is another process than the one that was let in: keep it out until it has the weights."""
        if self.state is WorkerState.ACTIVE:
            self.incarnation += 1
            self.withdrawn.clear()
            self.asleep, self.weights_lost = None, False
            self.put_in_quarantine("version", reason)

    def doubt(self) -> None:
        """A connection broke: it may have been restarted, so nothing is sent before its weights were looked at."""
        self.unsure = True
        self.attention.set()

    def become(self, state: WorkerState, reason: str) -> None:
        """Change state, say why, and wake whoever looks after this worker; one that is being removed stays so."""
        if self.state is WorkerState.DRAINING:
            return
        self.unsure = False
        if state is not WorkerState.QUARANTINED:
            self.quarantine = None
        before = self.state
        if before is WorkerState.DEAD and state is not WorkerState.DEAD:
            self.incarnation += 1
        if state is WorkerState.DEAD:
            self.withdrawn.clear()
            self.contradiction = None
        self.state = state
        self.reason = reason
        self.attention.set()
        if before is not state:
            self._on_change(self, before, state, reason)

    def as_json(self) -> dict[str, Any]:
        """Return the record of `status.workers`."""
        return {
            "id": self.worker_id,
            "url": self.endpoint.url,
            "dialect": self.dialect.name if self.profile is not None or len(self.candidates) == 1 else "auto",
            "state": str(self.state),
            "incarnation": self.incarnation,
            "reason": self.reason,
            "in_flight": len(self.calls),
            "tokens_in_flight": self.tokens,
            "limit": self.limit,
            "capabilities": list(self.capabilities),
            "engine_version": None if self.profile is None else self.profile.engine_version,
            "model": None if self.profile is None else self.profile.model,
            "weight_version": self.version,
            "frozen": self.freeze is not None,
            "asleep": [] if self.asleep is None else list(self.asleep.listed),
            "process": None if self.launched is None else self.launched.as_json(),
            "engines": None if self.front is None else [engine.url for engine in self.engines],
        }
