"""Running counts of what happened to samples, kept for the metrics of a batch.

Invariants:

- Counts only grow; whoever wants a period keeps a snapshot and subtracts.
- What was dropped is handed out once: to the batch that tells of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollout_svc.rollout.rewards import RewardSum

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
        dropped: rewards of groups that were finished and then dropped, by task, since the last batch.
    """

    aborted: int = 0
    continued: int = 0
    redone: int = 0
    last_failure: str = ""
    failed: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, RewardSum] = field(default_factory=dict)

    def drop(self, task: str, rewards: list[float]) -> None:
        """Count the rewards of a finished group that no batch will have."""
        self.dropped[task] = self.dropped.get(task, RewardSum()) + RewardSum.of(rewards)

    def take_dropped(self) -> dict[str, RewardSum]:
        """Hand out what was dropped, and begin again."""
        dropped, self.dropped = self.dropped, {}
        return dropped

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
