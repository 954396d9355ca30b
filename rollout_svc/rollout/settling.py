"""The end of a group that no trainer gets: one place that settles it, counts it, says so and has it written down.

Invariant: a group is settled, tallied, told and noted in one synchronous step.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout_svc.buffer.storage import Storage
from rollout_svc.events import EventBus, GroupSettled
from rollout_svc.group import Group, Settlement
from rollout_svc.rollout.tally import Tally

__all__ = ["Settling"]


class Settling:
    """Ends groups for good; see the module's invariant."""

    def __init__(self, *, tally: Tally, bus: EventBus, storage: Storage) -> None:
        self.again: Callable[[Group], bool] = lambda _: False
        """Asked of a group that expired: whether its prompt is kept, to be admitted once more."""
        self._tally = tally
        self._bus = bus
        self._storage = storage

    def settle(self, group: Group, outcome: Settlement, reason: str) -> None:
        """End a group that no run holds."""
        group.settle(outcome, reason)
        self.announce(group)

    def announce(self, group: Group) -> None:
        """Count, tell and note a group that its run has settled."""
        self._tally.settled[f"{group.account}:{group.reason}"] += 1
        again = group.account == "expired" and self.again(group)
        self._storage.settled(group, again=again)
        self._bus.emit(GroupSettled(group.group_id, group.prompt.task, group.account, group.reason))
