"""The account of every admitted group and sample.

Invariants:

- `admitted` equals the sum of the nine accounts, for groups and for samples, after every call.
- No account is ever below zero: a move from an empty account raises `LedgerImbalance` and changes nothing.
- Settled accounts (consumed, filtered, expired, failed) only grow.
- Groups are counted by task as well; the accounts of the tasks add up to those of all.
- The ledger holds counts alone, so its size does not depend on how much was ever produced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from rollout_svc.errors import LedgerImbalance

__all__ = ["ACCOUNTS", "SETTLED", "Account", "Ledger"]

Account = Literal["queued", "in_flight", "aborted", "ready", "leased", "consumed", "filtered", "expired", "failed"]

ACCOUNTS: Final[tuple[Account, ...]] = (
    "queued",
    "in_flight",
    "aborted",
    "ready",
    "leased",
    "consumed",
    "filtered",
    "expired",
    "failed",
)
SETTLED: Final[frozenset[Account]] = frozenset({"consumed", "filtered", "expired", "failed"})


class _Book:
    """One column of accounts whose sum is `admitted`."""

    __slots__ = ("admitted", "counts", "unit")

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.admitted = 0
        self.counts: dict[Account, int] = dict.fromkeys(ACCOUNTS, 0)

    def admit(self, number: int) -> None:
        self.admitted += number
        self.counts["queued"] += number

    def move(self, source: Account, target: Account, number: int) -> None:
        if source == target:
            return
        if source in SETTLED:
            raise LedgerImbalance(f"{number} {self.unit} would leave {source}, which is for good")
        if self.counts[source] < number:
            raise LedgerImbalance(
                f"{number} {self.unit} would leave {source} for {target}, but only {self.counts[source]} are there"
            )
        self.counts[source] -= number
        self.counts[target] += number

    def recall(self, counts: Mapping[Account, int]) -> None:
        for name, number in counts.items():
            if name not in SETTLED or number < 0:
                raise LedgerImbalance(f"{number} {self.unit} in {name} cannot be recalled")
            self.counts[name] += number
            self.admitted += number

    def as_json(self) -> dict[str, int]:
        return {"admitted": self.admitted} | {str(name): number for name, number in self.counts.items()}


class Ledger:
    """Counts of one lane, for groups and for samples, and the two tallies beside them."""

    __slots__ = ("_groups", "_samples", "_tasks", "late_discarded", "redone")

    def __init__(self) -> None:
        self._groups = _Book("groups")
        self._samples = _Book("samples")
        self._tasks: dict[str, _Book] = {}
        self.late_discarded = 0
        self.redone = 0

    def __repr__(self) -> str:
        groups = {name: n for name, n in self._groups.counts.items() if n}
        return f"<Ledger groups={groups} admitted={self._groups.admitted} late={self.late_discarded}>"

    def admit(self, samples: int, task: str = "") -> None:
        """Enter one group of a task with `samples` members, all queued."""
        self._groups.admit(1)
        self.task(task).admit(1)
        self._samples.admit(samples)

    def recall(
        self, groups: Mapping[str, Mapping[Account, int]], samples: Mapping[Account, int], late: int, redone: int
    ) -> None:
        """Go on from the settled accounts of an earlier life; what is unsettled is admitted again by whoever has it.

        Args:
            groups: by task and account.
            samples: by account.
            late: late writes that were discarded.
            redone: samples that were begun again.
        """
        for task, counts in groups.items():
            self._groups.recall(counts)
            self.task(task).recall(counts)
        self._samples.recall(samples)
        self.late_discarded += late
        self.redone += redone

    def move_group(self, source: Account, target: Account, task: str = "") -> None:
        """Move one group between accounts; raises LedgerImbalance if `source` is empty or settled."""
        self.task(task).move(source, target, 1)  # the narrower book: what is there is in the other as well
        self._groups.move(source, target, 1)

    def move_samples(self, source: Account, target: Account, number: int = 1) -> None:
        """Move `number` samples between accounts; raises LedgerImbalance likewise."""
        self._samples.move(source, target, number)

    def task(self, name: str) -> _Book:
        """The accounts of one task's groups."""
        book = self._tasks.get(name)
        if book is None:
            book = self._tasks[name] = _Book("groups")
        return book

    def groups(self, account: Account) -> int:
        """Number of groups in an account."""
        return self._groups.counts[account]

    def samples(self, account: Account) -> int:
        """Number of samples in an account."""
        return self._samples.counts[account]

    @property
    def unsettled_groups(self) -> int:
        """Groups admitted and not yet consumed, filtered, expired or failed."""
        return self._groups.admitted - sum(self._groups.counts[name] for name in SETTLED)

    def check(self) -> None:
        """Raise LedgerImbalance unless both equations hold."""
        for book in (self._groups, self._samples, *self._tasks.values()):
            total = sum(book.counts.values())
            if total != book.admitted or min(book.counts.values()) < 0:
                raise LedgerImbalance(f"{book.unit}: admitted {book.admitted} is not {total}: {book.counts}")

    def as_json(self) -> dict[str, Any]:
        """Return the record of the contract: groups, samples, late_discarded, redone."""
        return {
            "groups": self._groups.as_json(),
            "samples": self._samples.as_json(),
            "late_discarded": self.late_discarded,
            "redone": self.redone,
        }
