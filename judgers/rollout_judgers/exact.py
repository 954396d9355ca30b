"""`exact`: 1 where the response is the ground truth, else 0."""

from __future__ import annotations

from rollout_svc.judging import JudgedSample, Reward

__all__ = ["Exact"]


class Exact:
    """Compare the response with `ground_truth`, as text where there is a tokenizer, else as token ids.

    Args:
        strip: ignore blanks around both texts.
        ignore_case: compare texts without regard to case.
    """

    instant = True  # it compares, and nothing else

    def __init__(self, *, strip: bool = True, ignore_case: bool = False) -> None:
        self.strip = strip
        self.ignore_case = ignore_case

    def judge(self, sample: JudgedSample) -> Reward:
        """Return 1.0 or 0.0; a prompt without a ground truth cannot be judged and is an error."""
        truth = sample.ground_truth
        if truth is None:
            raise ValueError("the prompt has no ground_truth to compare with")
        if isinstance(truth, list):
            return Reward(float(sample.response_ids == truth))
        if sample.response is None:
            raise ValueError("ground_truth is text, but without a tokenizer the response is not")
        return Reward(float(self._normal(sample.response) == self._normal(str(truth))))

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
