"""What the coming batches ask of each task: whose groups make the next one, and whose prompt is needed first.

Invariants:

- It counts nothing itself: what a task has is read from the ledger, whenever it is asked.
- A task's carry changes when a batch is lent, and goes back when that lease ends without an ack.
- With one task it decides nothing: whatever is ready is handed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rollout_svc.group import Group
from rollout_svc.ledger import SETTLED, Account, Ledger
from rollout_svc.producer.mix import Supply, carried, most_behind, needs, waits_for
from rollout_svc.producer.staleness import hand_over_order

__all__ = ["Feeding", "Mixture", "Share"]

_UNDER_WAY: Final[tuple[Account, ...]] = ("queued", "in_flight", "aborted")


@dataclass(frozen=True, slots=True)
class Share:
    """What a task is to have: its weight in the mix, and how many of its groups may be admitted and not settled."""

    weight: float
    max_groups: int | None = None


class Feeding(Protocol):
    """What feeds the stage: the producer."""

    @property
    def flowing(self) -> bool:
        """Whether groups under way go on: a lane that is open, and a worker in traffic."""

    def admittable(self) -> int:
        """Groups that could be admitted now, were there prompts for them."""

    def obstacle(self, task: str) -> str:
        """Why no prompt of this task can be admitted now, whatever room there is; empty: one can."""

    def held_back(self, task: str) -> int:
        """Groups of this task that are admitted and under way, but that nothing goes on with for now."""


class Mixture:
    """The mix of tasks; see the module's invariants."""

    def __init__(self, *, shares: Mapping[str, Share], ledger: Ledger, feeding: Feeding) -> None:
        """Begin with nothing owed.

        Args:
            shares: what each task is to have.
            ledger: where groups are counted by task.
            feeding: what may be admitted.
        """
        self.groups = 0  # of the batch that was asked for last
        self.carry: dict[str, float] = {}
        self._shares = dict(shares)
        self._ledger = ledger
        self._feeding = feeding
        self._before: dict[str, dict[str, float]] = {}

    def __repr__(self) -> str:
        return f"<Mixture groups={self.groups} carry={self.carry}>"

    @property
    def most_groups(self) -> int | None:
        """Groups that the tasks' own limits allow in all; None: some task has none."""
        limits = [share.max_groups for share in self._shares.values()]
        given = [limit for limit in limits if limit is not None]
        return sum(given) if len(given) == len(limits) else None

    # -- counting --------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Groups of all tasks that are admitted and not finished."""
        return sum(self._ledger.groups(account) for account in _UNDER_WAY)

    def unsettled(self, task: str) -> int:
        """Groups of a task that are admitted and not settled, leased ones included."""
        book = self._ledger.task(task)
        return book.admitted - sum(book.counts[account] for account in SETTLED)

    def obstacle(self, task: str) -> str:
        """Why no prompt of this task can be admitted now, whatever room there is; empty: one can."""
        return "task_limit" if self.at_limit(task) else self._feeding.obstacle(task)

    def at_limit(self, task: str) -> bool:
        """Whether a task has as many groups as it may."""
        limit = self._shares[task].max_groups
        return limit is not None and self.unsettled(task) >= limit

    def stranded(self, task: str) -> bool:
        """Whether a task has as many groups as it may, and nothing goes on with any of them for now."""
        limit = self._shares[task].max_groups
        return limit is not None and self._feeding.held_back(task) >= limit

    def supplies(self) -> dict[str, Supply]:
        """What each task has and can bring."""
        flowing, room = self._feeding.flowing, self._feeding.admittable()
        return {task: self._supply(task, share, flowing, room) for task, share in self._shares.items()}

    def _supply(self, task: str, share: Share, flowing: bool, room: int) -> Supply:
        counts = self._ledger.task(task).counts
        under_way = sum(counts[account] for account in _UNDER_WAY) - self._feeding.held_back(task)
        out = under_way + counts["ready"]
        obstacle = self.obstacle(task)
        own = room if share.max_groups is None else min(room, share.max_groups - self.unsettled(task))
        coming = (under_way if flowing else 0) + (0 if obstacle else max(0, own))
        present = out > 0 or obstacle not in ("no_prompts", "exhausted", "failed")
        return Supply(share.weight, counts["ready"], out, coming, present)

    # -- batches ---------------------------------------------------------------------------------------------

    def missing(self, groups: int) -> dict[str, int]:
        """Groups by task that a batch of `groups` waits for, as far as they can still come."""
        return {} if len(self._shares) == 1 else waits_for(groups, self.supplies(), self.carry)

    def choose(self, groups: int, fresh: Iterable[Group]) -> list[Group] | None:
        """Choose a batch among the groups that may be handed over; None: it is not there yet.

        Args:
            groups: how many.
            fresh: every ready group, those that may not be handed over settled already.
        """
        ordered = sorted(fresh, key=hand_over_order)
        if len(ordered) < groups:
            return None
        if len(self._shares) == 1:
            return ordered[:groups]
        chosen = self._share_out(groups, ordered)
        return chosen if len(chosen) == groups else None

    def most(self, groups: int, fresh: Iterable[Group]) -> list[Group]:
        """Choose what of a batch of at most `groups` is there, for somebody who has the rest of it elsewhere."""
        ordered = sorted(fresh, key=hand_over_order)
        groups = min(groups, len(ordered))
        return ordered[:groups] if len(self._shares) == 1 else self._share_out(groups, ordered)

    def _share_out(self, groups: int, ordered: Iterable[Group]) -> list[Group]:
        """Of each task as many as a batch of `groups` needs of it, where they are there."""
        left = needs(groups, self.supplies(), self.carry)
        chosen: list[Group] = []
        for group in ordered:
            task = group.prompt.task
            if left.get(task, 0) > 0:
                left[task] -= 1
                chosen.append(group)
        return chosen

    def lent(self, batch_id: str, groups: Collection[Group]) -> None:
        """A batch was chosen and is lent: what each task is owed from now on; called before its groups are leased."""
        if len(self._shares) == 1:
            return
        taken: dict[str, int] = {}
        for group in groups:
            taken[group.prompt.task] = taken.get(group.prompt.task, 0) + 1
        after = carried(len(groups), self.supplies(), self.carry, taken)
        self._before[batch_id] = {task: after[task] - self.carry.get(task, 0.0) for task in after}
        self.carry = after

    def returned(self, batch_id: str) -> None:
        """The batch was not acknowledged, and its groups are ready again: it changed nothing in what is owed."""
        for task, change in self._before.pop(batch_id, {}).items():
            self.carry[task] -= change

    def acknowledged(self, batch_id: str) -> None:
        """The batch is consumed."""
        self._before.pop(batch_id, None)

    # -- prompts ---------------------------------------------------------------------------------------------

    def next_task(self, able: Collection[str]) -> str | None:
        """The task whose next prompt is needed first, of those that are `able` to give one."""
        if len(able) < 2:  # noqa: PLR2004 - nothing to choose
            return next(iter(able), None)
        return most_behind(self.groups, self.supplies(), self.carry, able)

    def as_json(self) -> dict[str, Any]:
        """Figures by task, for the status."""
        total = sum(share.weight for share in self._shares.values())
        return {task: self._figures(task, share.weight / total) for task, share in self._shares.items()}

    def _figures(self, task: str, share: float) -> dict[str, Any]:
        book = self._ledger.task(task)
        return {
            "admitted": book.admitted,
            "out": sum(book.counts[account] for account in _UNDER_WAY) + book.counts["ready"],
            "ready": book.counts["ready"],
            "leased": book.counts["leased"],
            "consumed": book.counts["consumed"],
            "share": round(share, 6),
            "waiting_for": self.obstacle(task),
        }
