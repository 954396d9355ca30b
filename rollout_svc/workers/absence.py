"""How long no worker has been in traffic, and when that is too long.

Invariants:

- It is counted only while prompts may start: a stage that is starting, paused or stopping misses nobody. After a pause
  the count goes on where it stood.
- A return in which nothing was answered does not start the count anew: an engine that comes back only to fail again is
  not there. One that stayed as long as it may be away is, whether there was work for it or not.
- It ends the service at most once, and only where a time was set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollout_svc.errors import NoWorker
from rollout_svc.gate import Gate
from rollout_svc.workers.pool import WorkerPool

__all__ = ["Absence", "Attendance"]


class Absence:
    """The count; pure, the time is passed in.

    Args:
        limit_s: seconds that are too long; None: nothing is.
    """

    __slots__ = ("_answered", "_back_at", "_counted_s", "_limit_s", "_since")

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._counted_s = 0.0
        self._back_at: float | None = None
        self._answered = 0

    def __repr__(self) -> str:
        return f"<Absence since={self._since} counted_s={self._counted_s:g} limit_s={self._limit_s}>"

    def lasted(self, now: float) -> float | None:
        """Seconds counted so far; None while a worker is there, or none is missed."""
        return None if self._since is None else self._counted_s + now - self._since

    def look(self, now: float, *, missed: bool, present: bool, answered: int) -> float | None:
        """Take note of how things are; returns the time at which it will have been too long, if it can come to that.

        Args:
            now: clock seconds.
            missed: prompts may start.
            present: a worker is in traffic.
            answered: requests answered so far, by whomever.
        """
        if present or not missed:
            if self._since is not None:
                self._counted_s += now - self._since
                self._since = None
            if present and self._back_at is None:
                self._back_at, self._answered = now, answered
            return None
        if self._since is None:
            self._since = now
            if self._back_at is not None:
                stayed = self._limit_s is None or now - self._back_at >= self._limit_s
                if stayed or answered != self._answered:
                    self._counted_s = 0.0
                self._back_at = None
        return None if self._limit_s is None else self._since - self._counted_s + self._limit_s


class Attendance:
    """Counts while nobody is there, and says so when it has been too long."""

    def __init__(
        self, *, pool: WorkerPool, gate: Gate, limit_s: float | None, on_end: Callable[[NoWorker], None]
    ) -> None:
        """`on_end` is called once, with the names of the workers and why each is out."""
        self._pool = pool
        self._gate = gate
        self._limit_s = limit_s
        self._on_end = on_end
        self._absence = Absence(limit_s)
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def absent_s(self) -> float | None:
        """Seconds for which no worker has been in traffic; None while one is, or nobody is missed."""
        return self._absence.lasted(asyncio.get_running_loop().time())

    def look(self) -> None:
        """The fleet or the gate changed."""
        loop, pool = asyncio.get_running_loop(), self._pool
        self.close()
        too_long_at = self._absence.look(
            loop.time(),
            missed=self._gate.is_open("train"),
            present=bool(pool.in_traffic),
            answered=pool.answered,
        )
        if too_long_at is not None and not self._ended:
            self._timer = loop.call_at(too_long_at, self._too_long)

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_long(self) -> None:
        self._timer, self._ended = None, True
        states = "; ".join(f"{w.worker_id} {w.state}: {w.reason}" for w in self._pool.workers.values())
        self._on_end(
            NoWorker(
                f"no worker was in traffic for producer.no_worker_timeout_s = {self._limit_s:g} s"
                f" ({states or 'the fleet is empty'})"
            )
        )
