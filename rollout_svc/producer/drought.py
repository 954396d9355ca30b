"""A filter that keeps nothing: how many groups were dropped in a row, and when that is to be said.

Invariants:

- Each task has a row of its own: one that keeps its groups does not hide one that keeps none.
- A row is told when it is `FIRST` long, and each time it has doubled. Nothing rests for it: where few prompts teach
  anything, the next one may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rollout_svc.events import EventBus, GroupFinished, GroupsAllFiltered, GroupSettled

__all__ = ["FIRST", "Drought", "Droughts"]

FIRST: Final = 32
"""Groups filtered in a row, none kept in between, at which it is told for the first time."""


class Drought:
    """How many groups of one task were filtered since one was kept."""

    __slots__ = ("_next", "in_a_row", "reason")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.reason = ""
        self._next = FIRST

    def __repr__(self) -> str:
        return f"<Drought in_a_row={self.in_a_row} reason={self.reason!r}>"

    @property
    def lasts(self) -> bool:
        """Whether it is long enough to be told to whoever waits for a batch."""
        return self.in_a_row >= FIRST

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
        self.in_a_row, self._next = 0, FIRST


class Droughts:
    """The drought of every task, told by the events of its groups."""

    __slots__ = ("_bus", "_by_task")

    def __init__(self, tasks: Iterable[str], bus: EventBus) -> None:
        self._by_task = {task: Drought() for task in tasks}
        self._bus = bus
        bus.subscribe(GroupFinished, self._finished)
        bus.subscribe(GroupSettled, self._settled)

    def __repr__(self) -> str:
        return f"<Droughts {self._by_task}>"

    def as_json(self) -> dict[str, int]:
        """Groups filtered in a row, by task."""
        return {task: drought.in_a_row for task, drought in self._by_task.items()}

    def told(self) -> str:
        """What to tell whoever waits for a batch; empty where there is nothing to tell."""
        return "; ".join(
            f"the last {drought.in_a_row} groups of task {task!r} were all filtered: {drought.reason}"
            for task, drought in self._by_task.items()
            if drought.lasts
        )

    def _finished(self, event: GroupFinished) -> None:
        self._by_task[event.task].kept()

    def _settled(self, event: GroupSettled) -> None:
        drought, reason = self._by_task[event.task], event.reason or ""
        if event.outcome == "filtered" and drought.filtered(reason):
            self._bus.emit(GroupsAllFiltered(event.task, drought.in_a_row, reason))
