"""A simulated engine: what it runs, what it was ever asked, and the weights it really has.

Invariants:

- Its own truth is kept apart from what it answers: `count()` is what really runs.
- A token is made at its own moment, by the weights that are loaded then; nothing is made while it is frozen, paused
  or down.
- A closed connection is noticed late, as SGLang does (it looks every 4 s); a request whose connection was closed
  before it arrived never arrives.
- An abort is by prefix; one for a request that waits at the door of a paused engine is lost for good, as SGLang's is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Request", "SimEngine"]

Finish = Literal["stop", "length", "abort"]
_MISSED_S: Final = 0.25  # seconds between two looks whether anybody has missed it
_DISCONNECT_S: Final = 4.0  # seconds between two looks of an engine whether the client is still there


class Request:
    """One request as the engine has it."""

    __slots__ = (
        "abort_lost",
        "aborting",
        "answer",
        "connected",
        "done",
        "engine",
        "experts_from",
        "finish",
        "input_ids",
        "lane",
        "lie",
        "life",
        "max_tokens",
        "rid",
        "sample_id",
        "serial",
        "since",
        "step_s",
        "stuck",
        "target",
        "timer",
        "tokens",
        "unrouted",
        "versions",
    )

    def __init__(self, rid: str, input_ids: list[int], max_tokens: int, life: int) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.max_tokens = max_tokens
        self.life = life
        self.sample_id = ""
        self.lane = ""
        self.engine: SimEngine | None = None
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.target = 0
        self.finish: Finish = "length"
        self.step_s = 0.0
        self.since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.answer: asyncio.Future[bool] | None = None
        self.connected = True
        self.aborting = False
        self.abort_lost = False
        self.stuck = False
        self.done = False
        self.experts_from: int | None = None  # the first row of routed experts that was asked for
        self.serial = 0  # of those who asked
        self.unrouted = False  # it was taken back to the queue, where the engine forgets them
        self.lie: str | None = None

    def __repr__(self) -> str:
        return f"{self.rid[-6:]}({len(self.tokens)}/{self.target})"


class SimEngine:
    """One engine process, and what becomes of it."""

    def __init__(self, world: World, name: str, url: str, batch: int, *, routed: bool = False) -> None:
        self.world = world
        self.name = name
        self.url = url
        self.weights = 0
        self.label = world.rng.choice(("default", "0"))
        self.up = True
        self.frozen = False
        self.paused: str | None = None
        self.slowness = 1.0
        self.loading = 0
        self.refusing = False
        self.routed = routed  # it can tell its routed experts
        self.lied = False  # it did not, although it was asked: it is not believed until it is another process
        self.boots = 0
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.door: dict[str, Request] = {}
        self.thawed = world.future()
        self.idle_waiters: list[asyncio.Future[None]] = []
        self._batch = batch

    def __repr__(self) -> str:
        return f"<SimEngine {self.name} v{self.weights} run={len(self.running)} wait={len(self.waiting)}>"

    def count(self, lanes: frozenset[str] | None = None) -> int:
        """How many requests the scheduler really has, of these lanes or of all."""
        if lanes is None:
            return len(self.running) + len(self.waiting)
        return sum(r.lane in lanes for table in (self.running, self.waiting) for r in table.values())

    @property
    def ticking(self) -> bool:
        """Whether it makes tokens now."""
        return self.up and not self.frozen and self.paused is None

    # -- requests --------------------------------------------------------------------------------------------

    def accept(self, request: Request, *, stuck: bool) -> asyncio.Future[bool]:
        """Take a request in; the future is true when it is answered, false when the engine died."""
        rng = self.world.rng
        request.engine = self
        request.answer = self.world.future()
        request.step_s = rng.uniform(0.004, 0.03)
        length = rng.randint(1, 30)
        request.finish = "stop" if length < request.max_tokens else "length"
        request.target = min(length, request.max_tokens)
        request.stuck = stuck
        self.world.say(self.name, "accepts", request, request.sample_id[-8:])
        if self.paused is not None or self.loading:
            self.door[request.rid] = request
        else:
            self._enter(request)
        return request.answer

    def _enter(self, request: Request) -> None:
        if len(self.running) < self._batch and self.paused is None:
            self.running[request.rid] = request
            request.since = self.world.now
            self._set_timer(request)
        else:
            self.waiting[request.rid] = request

    def _set_timer(self, request: Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if not self.ticking or request.stuck:
            return
        left = 1 if request.aborting else request.target - len(request.tokens)
        due = request.since + left * request.step_s * self.slowness - self.world.now
        request.timer = self.world.later(max(0.0, due), self._finished, request)

    def _advance(self, request: Request) -> None:
        """Make the tokens that are due."""
        step_s, now = request.step_s * self.slowness, self.world.now
        if not self.ticking or request.stuck:
            request.since = now
            return
        while len(request.tokens) < request.target and now - request.since >= step_s - 1e-9:
            request.tokens.append(self.world.tokens.make(request, self.weights))
            request.versions.append(self.weights)
            request.since += step_s

    def _finished(self, request: Request) -> None:
        request.timer = None
        if request.rid not in self.running or request.done or not self.ticking:
            return
        self._advance(request)
        if len(request.tokens) >= request.target:
            self._end(request, request.finish)
        elif request.aborting:
            self._end(request, "abort")
        else:
            self._set_timer(request)

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish, request.done = finish, True
        request.unrouted = finish == "abort" and request.rid in self.waiting
        for table in (self.running, self.waiting, self.door):
            table.pop(request.rid, None)
        if request.timer is not None:
            request.timer.cancel()
        self.world.say(self.name, "ends", request, finish)
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(True)
        while self.waiting and len(self.running) < self._batch and self.paused is None:
            rid = next(iter(self.waiting))
            self._enter(self.waiting.pop(rid))
        if not self.running and not self.waiting:
            self._tell_idle()

    def disconnected(self, request: Request, *, noticed: bool = True) -> None:
        """The client is gone; whether and when the engine sees it is its own affair."""
        request.connected = False
        if not request.done and noticed:
            self.world.later(self.world.rng.uniform(0.0, _DISCONNECT_S), self._notice, request)

    def _notice(self, request: Request) -> None:
        if self.up and not self.frozen and not request.done:
            self._abort_one(request, everything=True)
        elif self.frozen:
            self.world.later(_DISCONNECT_S, self._notice, request)

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, prefix: str | None) -> None:
        """Abort what begins with a prefix, or everything for None."""
        for request in [*self.running.values(), *self.waiting.values(), *self.door.values()]:
            if prefix is None or request.rid.startswith(prefix):
                self._abort_one(request, everything=prefix is None)

    def _abort_one(self, request: Request, *, everything: bool) -> None:
        if request.rid in self.door:
            if everything and not request.abort_lost:
                self._end(request, "abort")
            request.abort_lost = request.abort_lost or not everything
        elif request.rid in self.waiting:
            self._end(request, "abort")
        elif request.rid in self.running and not request.aborting:
            request.aborting = True
            self._advance(request)
            request.since = self.world.now
            self._set_timer(request)

    def pause(self, mode: str) -> None:
        """`abort`, `in_place` or `retract`, as SGLang's pause_generation."""
        for request in self.running.values():
            self._advance(request)
        if mode == "abort":
            for request in [*self.running.values(), *self.waiting.values()]:
                self._end(request, "abort")
        self.paused = mode
        for request in list(self.running.values()):
            self._set_timer(request)
            if mode == "retract":
                del self.running[request.rid]
                self.waiting[request.rid] = request
                if request.aborting:
                    self._end(request, "abort")

    def go_on(self) -> None:
        """Let a paused engine run again."""
        if self.paused is None:
            return
        self.paused = None
        self._restart_clocks()
        for table in (self.waiting, self.door):
            for rid in list(table):
                if not self.loading or table is self.waiting:
                    self._enter(table.pop(rid))

    def _restart_clocks(self) -> None:
        for request in self.running.values():
            request.since = self.world.now
            self._set_timer(request)

    def load_begins(self) -> None:
        """A weight update holds new requests at the door."""
        self.loading += 1

    def load_ends(self, version: int | None) -> None:
        """The weights are there, or the update was given up."""
        self.loading = max(0, self.loading - 1)
        if version is not None:
            for request in self.running.values():
                self._advance(request)
            self.weights, self.label = version, str(version)
            self.world.say(self.name, "has weights", version)
        if not self.loading and self.paused is None:
            for rid in list(self.door):
                self._enter(self.door.pop(rid))

    # -- fate ------------------------------------------------------------------------------------------------

    def set_slowness(self, slowness: float) -> None:
        """Run at another pace from now on."""
        for request in self.running.values():
            self._advance(request)
        self.slowness = slowness
        self._restart_clocks()

    def freeze(self) -> None:
        """Stop as SIGSTOP does."""
        for request in self.running.values():
            self._advance(request)
        self.frozen = True

    def thaw(self) -> None:
        """Go on as SIGCONT does."""
        self.frozen = False
        self._restart_clocks()
        self._wake_all()

    def _wake_all(self) -> None:
        thawed, self.thawed = self.thawed, self.world.future()
        thawed.set_result(None)
        self._tell_idle()

    def _tell_idle(self) -> None:
        for waiter in self.idle_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.idle_waiters.clear()

    def crash(self) -> None:
        """Lose everything: connections, requests, weights."""
        self.world.say(self.name, "crashes")
        self.up = False
        for request in [*self.running.values(), *self.waiting.values(), *self.door.values()]:
            request.done = True
            if request.timer is not None:
                request.timer.cancel()
            if request.answer is not None and not request.answer.done():
                request.answer.set_result(False)
        self.running.clear()
        self.waiting.clear()
        self.door.clear()
        self.paused, self.loading, self.frozen = None, 0, False
        self._wake_all()

    def restart(self) -> None:
        """Go away until that is noticed, and come back as another process."""
        self.crash()
        self.world.later(_MISSED_S, self._come_back_once_missed)  # what it said last may still be on its way

    def _come_back_once_missed(self) -> None:
        if self.world.life.mistrusts(self.url):
            self.world.later(_MISSED_S, self._come_back_once_missed)
        else:
            self.come_back(self.weights)

    def come_back(self, weights: int) -> None:
        """Start again, with weights of its own."""
        self.up = True
        self.weights = weights
        self.label = self.world.rng.choice(("default", str(weights))) if weights == 0 else str(weights)
        self.boots += 1
        self.world.say(self.name, "is back with weights", weights)

    def unstick(self) -> None:
        """Let go of requests that would never have ended."""
        for request in [*self.running.values(), *self.waiting.values(), *self.door.values()]:
            request.stuck = False
            request.since = self.world.now
            self._set_timer(request)

    def info(self) -> dict[str, Any]:
        """The record of `/model_info`."""
        return {"model_path": "sim", "weight_version": self.label}
