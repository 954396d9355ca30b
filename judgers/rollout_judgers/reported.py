"""`reported`: the reward that an environment or an agent told while the sample was made."""

from __future__ import annotations

from rollout_svc.judging import JudgedSample

__all__ = ["Reported"]


class Reported:
    """Give the reward that was told; a sample of which nobody told one is a failure, never a 0."""

    instant = True

    def judge(self, sample: JudgedSample) -> float:
        """Give it."""
        if sample.reported is None:
            raise ValueError("no reward was reported for this sample, by its environment or its agent")
        return sample.reported
