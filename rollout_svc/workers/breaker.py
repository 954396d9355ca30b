"""A circuit breaker: when a worker is left alone, and for how long.

Invariants:

- Pure: the time is passed in, and so is the random source of the jitter.
- One poison prompt cannot open it: soft failures count once per witness (a group) since the last success.
- The back-off doubles from `BASE_S` up to `CAP_S` while trials fail, and starts over after a success.
"""

from __future__ import annotations

from random import Random
from typing import Final, Literal

__all__ = ["BASE_S", "CAP_S", "THRESHOLD", "Breaker"]

THRESHOLD: Final = 3  # failures in a row before a worker is left alone
BASE_S: Final = 0.5  # seconds of the first back-off
CAP_S: Final = 30.0  # seconds of the longest one

State = Literal["closed", "open", "half_open"]


class Breaker:
    """Closed (traffic), open (none until `retry_at`), half open (one trial, or all where that was `proved`)."""

    __slots__ = ("_rng", "_seen", "failures", "opened", "proved", "retry_at", "state")

    def __init__(self, rng: Random) -> None:
        self.state: State = "closed"
        self.failures = 0
        self.opened = 0
        self.retry_at = 0.0
        self.proved = False
        self._seen: set[str] = set()
        self._rng = rng

    def __repr__(self) -> str:
        return f"<Breaker {self.state} failures={self.failures} opened={self.opened}>"

    def failed(self, now: float, witness: str, *, hard: bool) -> bool:
        """Count a failure; returns whether the breaker opened by it.

        Args:
            now: clock seconds.
            witness: who met it; what one witness meets again and again may be its own fault.
            hard: the worker is at fault for certain, whoever says so.
        """
        if self.state == "open":
            return False
        if self.state == "closed":
            if not hard and witness in self._seen:
                return False
            self._seen.add(witness)
            self.failures += 1
            if self.failures < THRESHOLD:
                return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Open at once, for the next longer back-off."""
        self.state = "open"
        self.proved = False
        self.opened += 1
        backoff = min(CAP_S, BASE_S * 2 ** min(self.opened - 1, 16))
        self.retry_at = now + backoff * self._rng.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """A request was answered: close, and forget the failures."""
        self.state = "closed"
        self.failures = 0
        self.opened = 0
        self._seen.clear()

    def look_again(self, now: float, wait_s: float) -> None:
        """Stay open for at most so long: asking costs nothing, and was no trial that failed."""
        self.retry_at = now + wait_s * self._rng.uniform(0.5, 1.0)

    def half_open(self, *, proved: bool = False) -> None:
        """Let one trial through, or all there is where the worker was just `proved` to work; a failure opens it."""
        self.state = "half_open"
        self.proved = proved
