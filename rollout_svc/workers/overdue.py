"""Ends the calls whose time is up.

Invariants:

- All calls have the same limit, so one timer does, for the oldest: no call has one of its own.
- The time that a worker stood still, frozen, is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_svc.workers.worker import Worker

__all__ = ["Overdue"]


class Overdue:
    """Watches the calls of a fleet.

    Args:
        workers: the fleet, by worker id, as it is at any time.
        limit_s: seconds that a call may take.
    """

    __slots__ = ("_limit_s", "_of", "_timer", "_workers")

    def __init__(self, workers: Mapping[str, Worker], limit_s: float) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._of: Worker | None = None  # whose oldest call the timer is for

    def __repr__(self) -> str:
        return f"<Overdue {self._limit_s:g} s {'watching' if self._timer is not None else 'idle'}>"

    def watch(self) -> None:
        """See to it that there is a timer; to be called whenever a call begins."""
        if self._timer is None:
            # A frozen worker's calls have all the time there is; when it goes on, they are as far apart as before.
            running = (worker for worker in self._workers.values() if worker.calls and not worker.standing)
            oldest = min(running, key=self._due, default=None)
            if oldest is not None:
                self._set(oldest)

    def _due(self, worker: Worker) -> float:
        first = next(iter(worker.calls.values()))
        return first.since + first.held_s + self._limit_s

    def _set(self, worker: Worker) -> None:
        self._of = worker
        self._timer = asyncio.get_running_loop().call_at(self._due(worker), self._end)

    def look_again(self, worker: Worker) -> None:
        """A frozen worker goes on: the timer may be for a younger call of one that went on earlier."""
        if self._timer is None or self._of is worker:
            self.close()
            self.watch()
        elif worker.calls and self._due(worker) < self._timer.when():
            self.close()
            self._set(worker)

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        limit = asyncio.get_running_loop().time() - self._limit_s
        for worker in self._workers.values():
            for call in () if worker.standing else list(worker.calls.values()):
                if call.since + call.held_s > limit:
                    break
                call.cancel("timeout")
        self.watch()
