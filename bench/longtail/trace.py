"""The recorded trace: how many tokens each sample of each prompt takes.

Invariants:

- A trace is its seed: equal seeds are equal traces, and the one that is measured is checked against its digest.
- A duration belongs to the sample, not to the try: what goes on has what is left of it, what is made again has all.
- Each duration is log-normal with sigma 1.2, cut at eight times the mean, as a limit on tokens would cut it.
- Half of a logarithm's variance is the prompt's and shared by its samples: long prompts are long every time.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Final

__all__ = ["CUT", "GROUP_SIZE", "MEAN_TOKENS", "RECORDED", "SEED", "TOKEN_S", "Trace", "make_trace", "recorded"]

SEED: Final = 1
PROMPTS: Final = 1280
GROUP_SIZE: Final = 8
SIGMA: Final = 1.2
SHARED: Final = 0.5
"""Share of the variance of a duration's logarithm that is the prompt's. Not given by the bench's definition."""
MEAN_TOKENS: Final = 32
"""Before the cut."""
CUT: Final = 8
"""In means: one sample in a hundred ends there."""
TOKEN_S: Final = 0.25
"""Seconds an engine takes for a token, with however many others: a slot is a slot."""
RECORDED: Final = "3735d1f702632483d249b39c4fc364fe63421db4d75a13477f0f3cd8a804072e"
"""SHA-256 of the trace of `SEED`, as 32-bit little-endian numbers."""


@dataclass(frozen=True)
class Trace:
    """Tokens by prompt and member: `tokens[prompt][member]`, each at least 1."""

    tokens: tuple[tuple[int, ...], ...]

    @cached_property
    def longest_tenth(self) -> frozenset[int]:
        """Prompts of the longest tenth, by the time a group of them takes that has a slot for each member."""
        order = sorted(range(len(self.tokens)), key=lambda prompt: (-max(self.tokens[prompt]), prompt))
        return frozenset(order[: len(order) // 10])

    @cached_property
    def mean_tokens(self) -> float:
        """Of a sample, after the cut."""
        return sum(map(sum, self.tokens)) / (GROUP_SIZE * len(self.tokens))

    @cached_property
    def mean_longest_tokens(self) -> float:
        """Of the longest sample of a group."""
        return sum(map(max, self.tokens)) / len(self.tokens)

    @property
    def digest(self) -> str:
        """What tells it from every other."""
        numbers = array("I", (count for group in self.tokens for count in group))
        return hashlib.sha256(numbers.tobytes()).hexdigest()


def make_trace(seed: int, prompts: int = PROMPTS) -> Trace:
    """Draw a trace; one of fewer prompts is the beginning of one of more."""
    rng = Random(f"longtail:{seed}")
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    own, shared = SIGMA * math.sqrt(1 - SHARED), SIGMA * math.sqrt(SHARED)

    def group() -> tuple[int, ...]:
        middle = mu + shared * rng.gauss(0, 1)
        drawn = (math.exp(middle + own * rng.gauss(0, 1)) for _ in range(GROUP_SIZE))
        return tuple(min(max(round(count), 1), CUT * MEAN_TOKENS) for count in drawn)

    return Trace(tuple(group() for _ in range(prompts)))


def recorded() -> Trace:
    """The trace that is measured.

    Raises:
        RuntimeError: this machine's arithmetic draws another one.
    """
    trace = make_trace(SEED)
    if trace.digest != RECORDED:
        raise RuntimeError(f"the trace of seed {SEED} has digest {trace.digest}, not {RECORDED}")
    return trace
