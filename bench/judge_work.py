"""The judges that `bench.judges` asks, in a module that judge processes import in no time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_svc.judging import JudgedSample

__all__ = ["Compares", "SometimesHangs", "compare"]

FOR_EVER_S = 3600.0
"""How long a judge that hangs does, in seconds: longer than any bench."""


def compare(sample: JudgedSample) -> float:
    """Judge as `exact` does."""
    return float(sample.response == sample.ground_truth)


class Compares:
    """Judge as `exact` does, in a process."""

    def judge(self, sample: JudgedSample) -> float:
        """Return 1.0 or 0.0."""
        return compare(sample)


class SometimesHangs:
    """Take a while, and hang at samples that say so.

    Args:
        run_s: How long a healthy judge takes, in seconds.
    """

    def __init__(self, *, run_s: float) -> None:
        self.run_s = run_s

    def judge(self, sample: JudgedSample) -> float:
        """Return the sample's own number."""
        time.sleep(FOR_EVER_S if sample.response == "hang" else self.run_s)
        return float(sample.ground_truth)
