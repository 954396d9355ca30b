"""What the engine is to say, instead of what its model would: rules over prompts.

A rule that a prompt meets replaces the model's distribution by one with the weight `peak` on the next token of what is
to be said, then on the end token, and the rest on all others alike. Sampling, log-probabilities, stops, aborts and
pauses go on over it as over the model's own.

Invariants:
- Pure. What is said depends on the prompt alone: any engine with the same script goes on where another one was cut.
- The rule is chosen where the model began to speak: after the last `turn` marker of the prompt; without a marker, where
  the prompt ends, or where what it ends with began, if that is the beginning of what the rule says.
- Tokens are told by their place: one that was drawn against the script does not change what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from torch import Tensor

    from rollout_svc.embedded.job import Job
    from rollout_svc.embedded.tokens import Vocabulary


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said to which prompts; a prompt has to meet all conditions that are given.

    Attributes:
        says: Token ids, the end token included: of the first time the rule decides in a conversation, the second, …;
            the last one stands for all later times.
        peak: Weight of the token that is to be said, above 0, at most 1.
        contains: In the prompt's text.
        ends_with: At its end.
        regex: Found in it.
        ids_end: Ids that the prompt ends with.
    """

    says: tuple[tuple[int, ...], ...]
    peak: float = 1.0
    contains: str = ""
    ends_with: str = ""
    regex: re.Pattern[str] | None = None
    ids_end: tuple[int, ...] = ()

    def meets(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a prompt, given as text and as ids, meets the conditions."""
        return (
            self.contains in text
            and text.endswith(self.ends_with)
            and (self.regex is None or self.regex.search(text) is not None)
            and tuple(ids[len(ids) - len(self.ids_end) :]) == self.ids_end
        )


@dataclass(frozen=True, slots=True)
class Scripted:
    """What one request is to say.

    Attributes:
        ids: All of the turn, the end token included.
        start: How many of them stand in the request's prompt already.
        peak: Their weight.
    """

    ids: tuple[int, ...]
    start: int
    peak: float

    def at(self, made: int) -> int:
        """Return the token that follows so many of the request's own; after the end, the end token."""
        return self.ids[min(self.start + made, len(self.ids) - 1)]


class Script:
    """Rules in order; the first that a prompt meets decides."""

    def __init__(self, rules: Sequence[Rule], vocabulary: Vocabulary, turn: Sequence[int] = ()) -> None:
        """Make a script.

        Args:
            rules: In order.
            vocabulary: Decodes prompts, special tokens kept.
            turn: Ids after which the model speaks; empty: unknown.
        """
        self._rules: Final = tuple(rules)
        self._vocabulary = vocabulary
        self._turn = tuple(turn)

    def __repr__(self) -> str:
        return f"<Script {len(self._rules)} rules>"

    def scripted(self, prompt: list[int]) -> Scripted | None:
        """Say what a request with this prompt is to say; None: whatever the model does."""
        began = self._turns(prompt)
        if not began:
            return self._unmarked(prompt)
        rule = self._decide(prompt[: began[-1]])
        if rule is None:
            return None
        times = 0
        if len(rule.says) > 1:
            times = sum(self._decide(prompt[:place]) is rule for place in began[:-1])
        ids = rule.says[min(times, len(rule.says) - 1)]
        return Scripted(ids, len(prompt) - began[-1], rule.peak)

    def _turns(self, prompt: list[int]) -> list[int]:
        """Return the places at which the model began to speak, as far as the marker tells."""
        turn, width = list(self._turn), len(self._turn)
        if not turn:
            return []
        return [
            place + width
            for place in range(len(prompt) - width + 1)
            if prompt[place] == turn[0] and prompt[place : place + width] == turn
        ]

    def _unmarked(self, prompt: list[int]) -> Scripted | None:
        """Find the longest end of the prompt that a rule says to what is before it; none: it speaks after all of it."""
        longest = max((len(ids) for rule in self._rules for ids in rule.says), default=1)
        for began in range(max(1, len(prompt) - longest), len(prompt) + 1):
            there = tuple(prompt[began:])
            if any(ids[: len(there)] == there for rule in self._rules for ids in rule.says):
                rule = self._decide(prompt[:began])
                if rule is not None and rule.says[0][: len(there)] == there:
                    return Scripted(rule.says[0], len(there), rule.peak)
        return None

    def _decide(self, ids: list[int]) -> Rule | None:
        text = self._vocabulary.decode(ids, skip_special_tokens=False)
        return next((rule for rule in self._rules if rule.meets(text, ids)), None)


def direct(logits: Tensor, jobs: Sequence[Job]) -> None:
    """Replace, in place, the logits of jobs that have a script: float32[at least len(jobs), vocab_size]."""
    chosen = [(row, job.script, len(job.ids)) for row, job in enumerate(jobs) if job.script is not None]
    if not chosen:
        return
    others = logits.shape[1] - 1
    rows = torch.tensor([row for row, _, _ in chosen])
    rest = [log((1 - script.peak) / others) if script.peak < 1 else -inf for _, script, _ in chosen]
    logits[rows] = torch.tensor(rest)[:, None].expand(-1, logits.shape[1])
    ids = torch.tensor([script.at(made) for _, script, made in chosen])
    logits[rows, ids] = torch.tensor([log(script.peak) for _, script, _ in chosen])
