"""`math`: whether the answer is worth the same as the ground truth, by math-verify (extra `math`).

Synchronous on purpose: the judge processes run it, and kill it at its timeout. Its own timeouts are signals, which work
in no thread and leave sympy in any state; they are off.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from typing import Any, Final

from rollout_judgers.options import a_count
from rollout_svc.errors import ConfigError
from rollout_svc.judging import JudgedSample, JudgeFailed, Reward

__all__ = ["Math", "as_math"]

_DELIMITED: Final = ("$", r"\boxed", r"\(", r"\[")
_NUMBER: Final = re.compile(r"\s*-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.?\d+)?\s*%?\s*|[\d\s.()+*/-]+")  # or a sum of some
_WORDS: Final = re.compile(r"[^\d\\^_{}]*[^\W\d_]{2,}[^\d\\^_{}]*")  # no formula, though one could be read into them


class Math:
    """Give 1.0 where the last answer in the response equals `ground_truth`, as numbers or as formulas; else 0.0.

    Args:
        decimals: digits after the point to which numbers have to agree.
        missing: the reward of a response in which there is no answer to be found; null: it is a failure.
    """

    def __init__(self, *, decimals: int = 6, missing: float | None = 0.0) -> None:
        self.decimals = a_count(decimals, "decimals")
        if missing is not None and (isinstance(missing, bool) or not isinstance(missing, int | float)):
            raise ConfigError.at("missing", f"{missing!r} is neither a number nor null")
        self.missing = missing
        if find_spec("math_verify") is None:
            raise ConfigError.at("name", "needs math-verify: pip install 'rollout-svc[math]'")

    def judge(self, sample: JudgedSample) -> Reward:
        """Compare; a ground truth that is no mathematics is an error, for nothing could equal it."""
        from math_verify import parse, verify  # noqa: PLC0415 - sympy takes a second, and only judge processes need it

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
        if sample.response is None:
            raise JudgeFailed("no_text", "an answer is text: set tokenizer.path")
        if sample.ground_truth is None:
            raise JudgeFailed("no_ground_truth", "the prompt has no ground_truth to compare with")
        gold: list[Any] = parse(as_math(str(sample.ground_truth)), parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise JudgeFailed("ground_truth", f"{sample.ground_truth!r:.200} is no mathematics")
        try:
            answer: list[Any] = parse(sample.response, parsing_timeout=None, raise_on_error=True)
        except (ValueError, RecursionError):  # such as a number of thousands of digits
            answer = []
        if not answer:
            if self.missing is None:
                raise JudgeFailed("no_answer", "no answer was found in the response")
            return Reward(float(self.missing))
        same = verify(gold, answer, float_rounding=self.decimals, timeout_seconds=None, raise_on_error=True)
        return Reward(float(same))


def as_math(truth: str) -> str:
    """Put a ground truth the way it is read: a bare formula between dollars; a number, or words, as it is."""
    if any(mark in truth for mark in _DELIMITED) or _NUMBER.fullmatch(truth) or _WORDS.fullmatch(truth):
        return truth
    return f"${truth}$"
