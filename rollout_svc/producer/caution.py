"""When every group fails: admit little, so that a wrong setting does not use up the data. Pure; the clock is passed in.

Invariants:

- `LIMIT` groups failed in a row, none finished in between: new prompts rest. One group that finishes ends it.
- Each rest lets one group through, as a trial, and the next rest is twice as long, up to `LONGEST_S`.
- Groups under way when it began may fail as they like: only a trial makes the next rest longer.
- A filtered group is neither a failure nor a success: it ends no row of failures, and no rest.
- Each task has a caution of its own: one that works does not hide one that fails, nor is held up by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["FIRST_S", "LIMIT", "LONGEST_S", "Caution", "Cautions"]

LIMIT: Final = 8
"""Groups that fail in a row before new ones rest: fewer may be bad luck with a few prompts."""
FIRST_S: Final = 0.5
"""Seconds of the first rest."""
LONGEST_S: Final = 30.0
"""Seconds of a rest, at most: what it takes to notice that a judge is back."""


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


class Cautions:
    """The caution of every task."""

    __slots__ = ("_by_task", "reason")

    def __init__(self, tasks: Iterable[str]) -> None:
        self._by_task = {task: Caution() for task in tasks}
        self.reason = ""

    def __repr__(self) -> str:
        return f"<Cautions {self._by_task}>"

    def rests(self, task: str, now: float) -> bool:
        """Whether new prompts of a task have to wait."""
        return self._by_task[task].resting(now)

    def resting(self, now: float) -> bool:
        """Whether those of every task have to."""
        return all(caution.resting(now) for caution in self._by_task.values())

    def ends(self) -> list[float]:
        """When the rests of the tasks are over, where there are any."""
        return [caution.until for caution in self._by_task.values() if caution.until is not None]

    def failed(self, task: str, reason: str, now: float) -> None:
        """A group of a task failed for good."""
        self.reason = reason
        self._by_task[task].failed(reason, now)

    def admitted(self, task: str, now: float) -> None:
        """A prompt of a task was admitted."""
        self._by_task[task].admitted(now)

    def finished(self, task: str) -> bool:
        """A group of a task finished; returns whether that ended a time of caution."""
        return self._by_task[task].finished()
