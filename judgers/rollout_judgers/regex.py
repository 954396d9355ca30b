"""`regex`: find the answer in the response, then compare it with the ground truth."""

from __future__ import annotations

import re

from rollout_svc.judging import JudgedSample, Reward

__all__ = ["Regex"]


class Regex:
    """Match a pattern; synchronous, so that a pattern that backtracks for ever is killed at its timeout.

    Args:
        pattern: a regular expression. With a group, the last match's first group must equal `ground_truth`;
            without one, a match is enough.
        ignore_case: compare without regard to case.
    """

    def __init__(self, *, pattern: str, ignore_case: bool = False) -> None:
        self.pattern = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        self.ignore_case = ignore_case

    def judge(self, sample: JudgedSample) -> Reward:
        """Return 1.0 or 0.0."""
        if sample.response is None:
            raise ValueError("a pattern needs text: set tokenizer.path")
        found = None
        for found in self.pattern.finditer(sample.response):  # noqa: B007 - the last match is the answer
            pass
        if found is None:
            return Reward(0.0)
        if self.pattern.groups == 0:
            return Reward(1.0)
        if sample.ground_truth is None:
            raise ValueError("the pattern has a group, but the prompt has no ground_truth to compare it with")
        return Reward(float(self._normal(found.group(1) or "") == self._normal(str(sample.ground_truth))))

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()
