"""The account that is kept outside of the service: what it was given, what it gave, what it was told is consumed.

- Pure: no I/O; the clock is passed in (wall clock, seconds: leases go on while no process runs).
- A prompt is consumed as often as it was given, never more; a group is consumed once and never shown again.
- What was lent and not acknowledged belongs to its lease: until that ends, no other batch shows a group of it.
- A call that was not answered has had effect or not: both are allowed until the answer to its repetition decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Books", "BrokenPromiseError", "Lent"]


class BrokenPromiseError(AssertionError):
    """Raised when the service contradicts the books."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A batch that was answered and is not known to be consumed.

    Attributes:
        asked_at: when it was asked for: its lease began no earlier.
        groups: prompt id by group id, in the order of the batch.
    """

    batch_id: str
    step: int
    asked_at: float
    groups: dict[str, str]


class Books:
    """What must hold of a service that may be killed at any moment.

    Args:
        lines: prompts of a file by id: the tokens of their whole answer.
        passes: how often each of them is to be consumed.
        group_size: samples of a group.
        lease_s: how long a batch is lent.
    """

    def __init__(self, lines: Mapping[str, list[int]], passes: int, group_size: int, lease_s: float) -> None:
        self.answers: dict[str, list[int]] = dict(lines)
        self.due: Counter[str] = Counter(dict.fromkeys(lines, passes))
        self.consumed: Counter[str] = Counter()
        self.consumed_groups: dict[str, int] = {}
        self.lent: dict[int, Lent] = {}
        self.batches = 0
        self._group_size = group_size
        self._lease_s = lease_s
        self._prompts: dict[str, str] = {}

    def copy(self) -> Books:
        """The same books, to go back to."""
        made = Books({}, 0, self._group_size, self._lease_s)
        made.answers, made.due, made.consumed = dict(self.answers), self.due.copy(), self.consumed.copy()
        made.consumed_groups, made.lent, made.batches = dict(self.consumed_groups), dict(self.lent), self.batches
        made._prompts = dict(self._prompts)
        return made

    def go_back(self, step: int) -> None:
        """What was consumed at that step or later was not, and what was lent for it is free."""
        for group_id, at in list(self.consumed_groups.items()):
            if at >= step:
                del self.consumed_groups[group_id]
                self.consumed[self._prompts.pop(group_id)] -= 1
        self.lent = {at: lent for at, lent in self.lent.items() if at < step}

    @property
    def left(self) -> int:
        """Prompts that are still to be consumed, counted as often as they are."""
        return self.due.total() - self.consumed.total()

    @property
    def lendable(self) -> int:
        """Those of them that are not lent."""
        return self.left - sum(len(lent.groups) for lent in self.lent.values())

    # -- prompts ---------------------------------------------------------------------------------------------

    def push(self, prompts: Mapping[str, list[int]]) -> None:
        """Prompts are about to be pushed: from now on the service may have them."""
        self.answers |= prompts

    def pushed(self, prompt_ids: Iterable[str], accepted: int) -> None:
        """A push was answered: from now on the service has all of them, each once.

        Raises:
            BrokenPromiseError: more were new than can have been.
        """
        ids = list(prompt_ids)
        fresh = sum(prompt_id not in self.due for prompt_id in ids)
        if accepted > fresh:
            raise BrokenPromiseError(f"{accepted} pushed prompts were new, but only {fresh} of {len(ids)} can be")
        for prompt_id in ids:
            self.due[prompt_id] = 1

    # -- batches ---------------------------------------------------------------------------------------------

    def took(self, batch: Mapping[str, Any], asked_at: float, now: float) -> None:
        """A take was answered.

        Args:
            batch: the answer.
            asked_at: when the call was made.
            now: when it was answered.

        Raises:
            BrokenPromiseError: a group that is consumed, or lent to another step; another batch for a step that is
                lent; an answer that is not the one its prompt has; a prompt more often than it was given.
        """
        step, batch_id = int(batch["step"]), str(batch["batch_id"])
        groups = {str(group["group_id"]): str(group["prompt"]["id"]) for group in batch["groups"]}
        for group in batch["groups"]:
            self._check(group)
        before = self.lent.get(step)
        if before is not None and before.batch_id != batch_id:
            self._lapsed(before, now, f"step {step} gives batch {batch_id} after {before.batch_id}")
        elif before is not None and list(before.groups) != list(groups):
            raise BrokenPromiseError(f"batch {batch_id} has changed: {before.groups} are now {groups}")
        for other in [lent for lent in self.lent.values() if lent.step != step]:
            if shared := other.groups.keys() & groups.keys():
                self._lapsed(other, now, f"groups {shared} are lent to steps {other.step} and {step}")
        if again := self.consumed_groups.keys() & groups.keys():
            raise BrokenPromiseError(f"groups {again} were acknowledged, and came again in batch {batch_id}")
        first = before.asked_at if before is not None and before.batch_id == batch_id else asked_at
        self.lent[step] = Lent(batch_id, step, first, groups)
        self.batches += before is None or before.batch_id != batch_id
        self._check_counts()

    def _check(self, group: Mapping[str, Any]) -> None:
        prompt_id, samples = str(group["prompt"]["id"]), group["samples"]
        expected = self.answers.get(prompt_id)
        if expected is None:
            raise BrokenPromiseError(f"nobody gave prompt {prompt_id!r}")
        if len(samples) != self._group_size:
            raise BrokenPromiseError(f"group {group['group_id']} has {len(samples)} samples")
        for sample in samples:
            if sample["status"] != "COMPLETED" or sample["reward"] != 1.0:
                said = sample["status"], sample["reward"], sample["response_ids"]
                raise BrokenPromiseError(f"sample {sample['sample_id']} of {prompt_id}: {said}, not {expected}")
            if sample["response_ids"] != expected or len(sample["logprobs"]) != len(expected):
                tokens = f"{sample['response_ids']} with {len(sample['logprobs'])} logprobs"
                raise BrokenPromiseError(f"sample {sample['sample_id']} of {prompt_id}: {tokens}, not {expected}")

    def _check_counts(self) -> None:
        shown = self.consumed.copy()
        for lent in self.lent.values():
            shown.update(lent.groups.values())
        for prompt_id, times in shown.items():
            most = self.due[prompt_id] or 1  # of a push that was not answered
            if times > most:
                raise BrokenPromiseError(f"prompt {prompt_id} was given {most} times and came {times} times")

    def _lapsed(self, lent: Lent, now: float, otherwise: str) -> None:
        """Its lease can only have ended: forget it, or say what is wrong."""
        if now < lent.asked_at + self._lease_s:
            raise BrokenPromiseError(f"{otherwise}, though {lent.batch_id} is lent for {self._lease_s:g} s")
        del self.lent[lent.step]

    def acked(self, batch_id: str) -> None:
        """An ack was answered: its groups are consumed for good."""
        for step, lent in list(self.lent.items()):
            if lent.batch_id == batch_id:
                del self.lent[step]
                self.consumed.update(lent.groups.values())
                self.consumed_groups |= dict.fromkeys(lent.groups, step)
                self._prompts |= lent.groups
        for prompt_id in self.consumed:
            self.due.setdefault(prompt_id, 1)  # a push without an answer, that has come all the way

    def refused(self, batch_id: str, now: float) -> None:
        """An ack was refused, because the lease has ended.

        Raises:
            BrokenPromiseError: it cannot have.
        """
        for lent in list(self.lent.values()):
            if lent.batch_id == batch_id:
                self._lapsed(lent, now, f"the ack of {batch_id} was refused")

    # -- the ledger ------------------------------------------------------------------------------------------

    def audit(self, ledger: Mapping[str, Any]) -> None:
        """Hold the service's own ledger against the books; every ack has been answered.

        Raises:
            BrokenPromiseError: an equation does not hold, or its count of what is consumed is another.
        """
        for unit, size in (("groups", 1), ("samples", self._group_size)):
            book = dict(ledger[unit])
            admitted = book.pop("admitted")
            if admitted != sum(book.values()):
                raise BrokenPromiseError(f"{unit}: {admitted} admitted are not {book}")
            if book["consumed"] != size * len(self.consumed_groups):
                raise BrokenPromiseError(
                    f"{unit}: {book['consumed']} consumed, by the books {len(self.consumed_groups)}"
                )
            if lost := {name: book[name] for name in ("filtered", "expired", "failed") if book[name]}:
                raise BrokenPromiseError(f"{unit}: {lost}, and nothing here can fail")
