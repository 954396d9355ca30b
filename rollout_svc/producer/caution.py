"""What the outcomes of groups say about starting more, and about a filter that keeps nothing. Pure.

Where every group fails little is admitted, so that a wrong setting does not use up the data. Invariants:

- `LIMIT` groups failed in a row, none finished in between: new prompts rest. One group that finishes ends it.
- Each rest lets one group through, as a trial, and the next rest is twice as long, up to `LONGEST_S`.
- Groups under way when it began may fail as they like: only a trial makes the next rest longer.
- A filtered group is neither a failure nor a success: it ends no row of failures, and no rest.
- A row of filtered groups is told when it is `DROUGHT` long, and each time it has doubled. Nothing rests for it: where
  few prompts teach anything, the next one may.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DROUGHT", "FIRST_S", "LIMIT", "LONGEST_S", "Caution", "Drought"]

LIMIT: Final = 8
"""Groups that fail in a row before new ones rest: fewer may be bad luck with a few prompts."""
FIRST_S: Final = 0.5
"""Seconds of the first rest."""
LONGEST_S: Final = 30.0
"""Seconds of a rest, at most: what it takes to notice that a judge is back."""
DROUGHT: Final = 32
"""Groups filtered in a row, none kept in between, at which it is told for the first time."""


class Drought:
    """How many groups were filtered since one was kept."""

    __slots__ = ("_next", "in_a_row", "reason")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.reason = ""
        self._next = DROUGHT

    def __repr__(self) -> str:
        return f"<Drought in_a_row={self.in_a_row} reason={self.reason!r}>"

    @property
    def lasts(self) -> bool:
        """Whether it is long enough to be told to whoever waits for a batch."""
        return self.in_a_row >= DROUGHT

    def filtered(self, reason: str) -> bool:
        """A group was filtered; returns whether that is to be told."""
        self.in_a_row += 1
        self.reason = reason
        if self.in_a_row < self._next:
            return False
        self._next *= 2
        return True

    def kept(self) -> None:
        """A group was kept."""
        self.in_a_row, self._next = 0, DROUGHT


class Caution:
    """What the outcomes of groups say about starting more."""

    __slots__ = ("_in_a_row", "_rest_s", "reason", "until")

    def __init__(self) -> None:
        self._in_a_row = 0
        self._rest_s = 0.0
        self.reason = ""
        self.until: float | None = None

    def __repr__(self) -> str:
        return f"<Caution in_a_row={self._in_a_row} until={self.until} reason={self.reason!r}>"

    def resting(self, now: float) -> bool:
        """Whether a new prompt has to wait."""
        return self.until is not None and now < self.until

    def failed(self, reason: str, now: float) -> None:
        """A group failed for good."""
        self._in_a_row += 1
        self.reason = reason
        if self._in_a_row >= LIMIT and self.until is None:
            self._rest_s = FIRST_S
            self.until = now + FIRST_S

    def admitted(self, now: float) -> None:
        """A prompt was admitted: in a time of caution it is a trial, and the next one waits longer."""
        if self.until is not None:
            self._rest_s = min(2 * self._rest_s, LONGEST_S)
            self.until = now + self._rest_s

    def finished(self) -> bool:
        """A group finished; returns whether that ended a time of caution."""
        ended = self.until is not None
        self._in_a_row, self.until = 0, None
        return ended
