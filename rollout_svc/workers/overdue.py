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

    __slots__ = ("_limit_s", "_timer", "_workers")

    def __init__(self, workers: Mapping[str, Worker], limit_s: float) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Overdue {self._limit_s:g} s {'watching' if self._timer is not None else 'idle'}>"

    def watch(self) -> None:
        """See to it that there is a timer; to be called whenever a call begins."""
        if self._timer is None:
            # A frozen worker's calls have all the time there is; when it goes on, they are as far apart as before.
            running = (worker for worker in self._workers.values() if worker.calls and not worker.standing)
            firsts = (next(iter(worker.calls.values())) for worker in running)
            oldest = min((call.since + call.held_s for call in firsts), default=None)
            if oldest is not None:
                self._timer = asyncio.get_running_loop().call_at(oldest + self._limit_s, self._end)

    def look_again(self) -> None:
        """A frozen worker goes on: the timer may be for a younger call of one that went on earlier."""
        self.close()
        self.watch()

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
