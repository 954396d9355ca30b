"""The end of a group that no trainer gets: one place that settles it, counts it, says so and has it written down.

Invariants:

- A group is settled, tallied, told and noted in one synchronous step.
- Who is told of it finds counts and reasons in it, and no text, tokens or records: those are gone by then (P28).
- The rewards of a finished group are counted before they go: what is dropped is in the next batch's figures.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout_svc.buffer.storage import Storage
from rollout_svc.events import EventBus, GroupSettled
from rollout_svc.group import Group, Settlement
from rollout_svc.rollout.tally import Tally
from rollout_svc.sample import Sample

__all__ = ["Settling"]


class Settling:
    """Ends groups for good; see the module's invariants."""

    def __init__(self, *, tally: Tally, bus: EventBus, storage: Storage) -> None:
        self.again: Callable[[Group], bool] = lambda _: False
        """Asked of a group that expired: whether its prompt is kept, to be admitted once more."""
        self._tally = tally
        self._bus = bus
        self._storage = storage

    def settle(self, group: Group, outcome: Settlement, reason: str) -> None:
        """End a group that no run holds."""
        self.end(group, outcome, reason)
        self.announce(group)

    def end(self, group: Group, outcome: Settlement, reason: str, culprit: Sample | None = None) -> None:
        """Settle a group for a run, which announces it as it closes, in the same step."""
        if group.complete and group.lane == "train":
            rewards = [sample.reward for sample in group.samples if sample.reward is not None]
            self._tally.drop(group.prompt.task, rewards)
        group.settle(outcome, reason, culprit=culprit)

    def announce(self, group: Group) -> None:
        """Count, tell and note a group that its run has settled."""
        self._tally.settled[f"{group.account}:{group.reason}"] += 1
        again = group.account == "expired" and self.again(group)
        self._storage.settled(group, again=again)
        self._bus.emit(GroupSettled(group.group_id, group.prompt.task, group.account, group.reason))
