"""What is under way at one canned engine, when it is due, and how long its slots were busy.

Invariants:

- A generation is due a drawn time after its arrival, and answered then, or at once when it is aborted. What may have
  fewer tokens than the longest answer is due that much sooner.
- It keeps its slot busy from its arrival to its end, or to the moment it was due where it is answered later: what this
  process is late with is nobody's work.
- While paused, generations are kept: new ones are held, due ones wait for continue.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.canned.bodies import Bodies
    from bench.canned.connection import Connection

__all__ = ["MAX_RUNNING", "Engine", "Generation", "wanted"]

TICK_S = 0.001
"""Answers due within this time of each other leave together, in seconds."""
MAX_RUNNING = 65536
"""Requests it says it can run at once: no limit of its own."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Generation:
    """One request under way; times are of the engine's loop."""

    __slots__ = ("budget", "connection", "due", "prompt_tokens", "since", "wire_id")

    def __init__(self, wire_id: bytes, connection: Connection, budget: int, prompt_tokens: int, since: float) -> None:
        self.wire_id = wire_id
        self.connection = connection
        self.budget = budget
        self.prompt_tokens = prompt_tokens
        self.since = since
        self.due = math.inf


class Engine:
    """One engine, without a dialect: `routes` is filled by the one who speaks.

    Args:
        bodies: the answers.
        duration_s: draws the time from arrival to answer; None: hold every generation until it is aborted.
        partial_tokens: ids in the answer of an aborted one.
    """

    def __init__(self, bodies: Bodies, *, duration_s: Callable[[], float] | None, partial_tokens: int) -> None:
        self.bodies = bodies
        self.paused = False
        self.live: dict[bytes, Generation] = {}
        self.counts = {"served": 0, "aborted": 0, "max_running": 0}
        self.routes: dict[bytes, Callable[[Connection, bytes], None]] = {b"/busy": self._busy}
        self._duration_s = duration_s
        self._partial_tokens = partial_tokens
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, Generation]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._held: deque[Generation] = deque()
        self._busy_s = 0.0

    def generate(self, connection: Connection, wire_id: bytes, budget: int | None, prompt_tokens: int) -> bool:
        """Begin a generation; False when there is one of that id."""
        if wire_id in self.live:
            return False
        budget = self.bodies.response_tokens if budget is None else budget
        generation = Generation(wire_id, connection, budget, prompt_tokens, self._loop.time())
        self.live[wire_id] = generation
        connection.waiting_for = wire_id
        self.counts["max_running"] = max(self.counts["max_running"], len(self.live))
        if self.paused:
            self._held.append(generation)
        else:
            self._schedule(generation)
        return True

    def forget(self, wire_id: bytes, connection: Connection) -> None:
        """Drop what a client that left was waiting for."""
        generation = self.live.get(wire_id)
        if generation is not None and generation.connection is connection:
            self._take(generation)

    def abort(self, wire_ids: Iterable[bytes]) -> int:
        """Answer these at once, with partial tokens; return how many there were."""
        found = [self.live[wire_id] for wire_id in wire_ids if wire_id in self.live]
        for generation in found:
            self.answer(generation, min(generation.budget, self._partial_tokens), "abort")
        self.counts["aborted"] += len(found)
        return len(found)

    def abort_all(self) -> int:
        """Answer everything at once; return how many there were."""
        return self.abort(list(self.live))

    def go_on(self) -> None:
        """End a pause."""
        self.paused = False
        held, self._held = self._held, deque()
        for generation in held:
            if self.live.get(generation.wire_id) is generation:
                self._schedule(generation)

    def busy_s(self) -> float:
        """Busy slot-seconds so far."""
        now = self._loop.time()
        return self._busy_s + sum(min(now, generation.due) - generation.since for generation in self.live.values())

    def _busy(self, connection: Connection, _: bytes) -> None:
        answer: dict[str, Any] = {"busy_s": self.busy_s(), "at_s": self._loop.time(), "running": len(self.live)}
        connection.json(answer | self.counts)

    def _schedule(self, generation: Generation) -> None:
        if self._duration_s is None:
            return
        share = min(1.0, generation.budget / self.bodies.response_tokens)
        generation.due = due = self._loop.time() + share * self._duration_s()
        heapq.heappush(self._due, (due, next(self._numbers), generation))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._answer_due)
        elif due < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(due, self._answer_due)

    def _answer_due(self) -> None:
        self._timer = None
        now = self._loop.time() + TICK_S
        due, live = self._due, self.live
        while due and due[0][0] <= now:
            generation = heapq.heappop(due)[2]
            if live.get(generation.wire_id) is not generation:
                continue  # aborted, or its client left
            if self.paused:
                self._held.append(generation)
                continue
            tokens = min(generation.budget, self.bodies.response_tokens)
            self.answer(generation, tokens, "length" if tokens == generation.budget else "stop")
            self.counts["served"] += 1
        if due:
            self._timer = self._loop.call_at(due[0][0], self._answer_due)

    def _take(self, generation: Generation) -> None:
        del self.live[generation.wire_id]
        self._busy_s += min(self._loop.time(), generation.due) - generation.since

    def answer(self, generation: Generation, tokens: int, finish: str) -> None:
        """Answer one that is under way, with that many ids."""
        self._take(generation)
        connection = generation.connection
        connection.waiting_for = None
        body = self.bodies.body(tokens, finish, generation.wire_id, generation.prompt_tokens)
        connection.write(_HEAD % len(body) + body)


def wanted(body: bytes) -> dict[str, Any]:
    """The body of a control call, which may have none."""
    found = orjson.loads(body) if body.startswith(b"{") else {}
    return found if isinstance(found, dict) else {}
