"""So many a minute: a bucket of tokens that fills by itself. Pure: whoever asks brings the clock.

Invariants:

- In any stretch of t seconds no more than `burst + t * per_minute / 60` are let through.
- Who is told to come back at a time, and does, finds a token, unless somebody else took it first.
- A clock that goes backwards gives nothing.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TokenBucket"]

_BURST_S: Final = 1.0  # seconds of the rate that may come at once: a minute's worth would be a burst of its own
_TINY: Final = 1e-6  # of a token: what rounding may lack of a whole one


class TokenBucket:
    """Lets so many a minute through, a second's worth of them at once, and one at least."""

    __slots__ = ("_at", "_tokens", "burst", "per_s")

    def __init__(self, per_minute: float) -> None:
        self.per_s = per_minute / 60.0
        self.burst = max(1.0, self.per_s * _BURST_S)
        self._tokens = self.burst
        self._at: float | None = None

    def __repr__(self) -> str:
        return f"<TokenBucket {self._tokens:.2f} of {self.burst:g}, {self.per_s:g}/s>"

    def take(self, now: float) -> bool:
        """Take a token; False: there is none."""
        self._fill(now)
        if self._tokens < 1.0 - _TINY:
            return False
        self._tokens = max(0.0, self._tokens - 1.0)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds from now until there is a token."""
        self._fill(now)
        return max(0.0, (1.0 - self._tokens) / self.per_s)

    def _fill(self, now: float) -> None:
        if self._at is None:
            self._at = now
        elif now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
            self._at = now
