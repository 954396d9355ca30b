"""When a process that ended is started again.

Invariants:

- Pure: the time is passed in, and so is the random source of the jitter.
- Restarts number at most the budget in any window of time.
- A command that has never answered is tried twice at most: what is wrong with it is wrong every time.
- The back-off doubles with each restart in the window, from `BASE_S` up to `CAP_S`, and is halved at most by jitter.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

__all__ = ["BASE_S", "CAP_S", "UNPROVED_RESTARTS", "Restarts"]

BASE_S: Final = 1.0  # seconds of the first back-off
CAP_S: Final = 60.0  # seconds of the longest one
UNPROVED_RESTARTS: Final = 1  # of a command that never answered: its port may have been taken in the last moment


class Restarts:
    """The account of one command's restarts."""

    __slots__ = ("_budget", "_rng", "_times", "_window_s")

    def __init__(self, budget: int, window_s: float, rng: Random) -> None:
        self._budget = budget
        self._window_s = window_s
        self._rng = rng
        self._times: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<Restarts {len(self._times)} of {self._budget} in {self._window_s:g} s>"

    @property
    def used(self) -> int:
        """Restarts in the window, as of the last exit."""
        return len(self._times)

    def ended(self, now: float, *, proved: bool) -> float | None:
        """Count an exit; returns the seconds until the restart, or None where there is none.

        Args:
            now: clock seconds, never going back.
            proved: whether the command has answered, in this process or an earlier one.
        """
        while self._times and self._times[0] <= now - self._window_s:
            self._times.popleft()
        if len(self._times) >= (self._budget if proved else min(self._budget, UNPROVED_RESTARTS)):
            return None
        wait_s = min(CAP_S, BASE_S * 2.0 ** min(len(self._times), 16)) * self._rng.uniform(0.5, 1.0)
        self._times.append(now + wait_s)
        return wait_s
