"""Running counts of what happened to samples, kept for the metrics of a batch.

Invariant: counts only grow; whoever wants a period keeps a snapshot and subtracts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """What happened since the start.

    Attributes:
        aborted: samples whose turn was cut, or that were handed back while running.
        continued: samples that went on with tokens they already had.
        redone: samples begun again from their prompt.
        last_failure: reason and message of the failure that was counted last.
        failed: failed attempts of samples, by reason.
        settled: groups by outcome and reason (`expired:stale`).
    """

    aborted: int = 0
    continued: int = 0
    redone: int = 0
    last_failure: str = ""
    failed: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Tally:
        """A copy as of now."""
        return Tally(
            self.aborted, self.continued, self.redone, self.last_failure, Counter(self.failed), Counter(self.settled)
        )

    def since(self, earlier: Tally) -> Tally:
        """What happened after `earlier` was taken."""
        return Tally(
            self.aborted - earlier.aborted,
            self.continued - earlier.continued,
            self.redone - earlier.redone,
            self.last_failure,
            self.failed - earlier.failed,
            self.settled - earlier.settled,
        )
