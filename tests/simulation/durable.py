"""What became durable in one history, over all lives of the service: each prompt's way, counted from outside.

Invariants checked here, whenever something is written:

- A prompt is admitted once, and once more each time a group of it was settled to be admitted again (P31).
- A prompt ends once: consumed, filtered, failed, or expired for good (P1, P31).
- A batch that was acknowledged is never lent again, nor one of its groups (P31).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rollout_svc.buffer.journal import notes

if TYPE_CHECKING:
    from rollout_svc.assembly import Parts
    from tests.simulation.world import World

__all__ = ["Durable"]

_Key = tuple[str, str]  # task, prompt id


class Durable:
    """The account of one history."""

    def __init__(self, world: World) -> None:
        self.pushed: dict[_Key, None] = {}
        self.leases: dict[str, tuple[str, ...]] = {}
        self.acknowledged: set[str] = set()
        self.acknowledged_groups: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self._world = world
        self._prompts: dict[str, _Key] = {}  # by group
        self._admitted: Counter[_Key] = Counter()
        self._again: Counter[_Key] = Counter()
        self._ended: Counter[_Key] = Counter()

    def written(self, note: notes.Note) -> None:
        """One note is in the journal for good."""
        match note:
            case notes.Pushed():
                self.pushed.update(((note.task, prompt_id), None) for prompt_id, _ in note.lines)
            case notes.Admitted():
                self._admit(note)
            case notes.Settled():
                self._end(note.group_id, note.outcome, again=note.again)
            case notes.Leased():
                again = self.acknowledged_groups.intersection(note.group_ids)
                self._world.require(not again, "P31", f"groups {again} were acknowledged, and are lent again")
                self.leases[note.batch_id] = note.group_ids
            case notes.Consumed():
                self.acknowledged.add(note.batch_id)
                self.acknowledged_groups.update(note.group_ids)
                for group_id in note.group_ids:
                    self._end(group_id, "consumed", again=False)

    def _admit(self, note: notes.Admitted) -> None:
        key = self._prompts[note.group_id] = note.task, note.prompt_id
        self._admitted[key] += 1
        within = self._admitted[key] <= 1 + self._again[key]
        self._world.require(within, "P31", f"prompt {key} is admitted {self._admitted[key]} times")

    def _end(self, group_id: str, outcome: str, *, again: bool) -> None:
        key = self._prompts[group_id]
        self.outcomes[outcome] += 1
        (self._again if again else self._ended)[key] += 1
        self._world.require(self._ended[key] <= 1, "P31", f"prompt {key} has ended {self._ended[key]} times")

    def check_recovered(self, parts: Parts) -> None:
        """A new life has the totals of the ones before."""
        found = {name: parts.ledger.groups(name) for name in ("consumed", "filtered", "expired", "failed")}
        known = {name: self.outcomes[name] for name in found}
        self._world.require(found == known, "P31", f"the totals were {known}, they are recovered as {found}")
        open_ = self._admitted.total() - self.outcomes.total()
        held = parts.ledger.unsettled_groups
        self._world.require(held == open_, "P31", f"{open_} groups were open, {held} are recovered")

    def check_ended(self) -> None:
        """Everything is quiet: every prompt that was pushed has come to one end."""
        for key in self.pushed:
            ended, admitted, again = self._ended[key], self._admitted[key], self._again[key]
            whole = ended == 1 and admitted == 1 + again
            self._world.require(whole, "P31", f"prompt {key} ended {ended} times, {admitted} admissions, {again} again")
