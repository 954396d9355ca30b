"""The demo's task: sort a few digits; prompts, judger, and what a policy that guesses would get.

A prompt is `5203=`, its answer `0235` and the end token.

Invariants:

- The reward is the share of positions that are right, the end token's included, over the longer of answer and
  target: only the exact answer gets 1.0, and nothing is gained by stopping early or rambling on.
- Everything here works on token ids of one fixed vocabulary, the one `write_tokenizer` writes.
- Prompts depend on the seed alone.
- Nothing here imports torch: the service loads this module for its judger.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollout_svc.judging import JudgedSample

__all__ = [
    "END_ID",
    "MAX_REWARD",
    "VOCABULARY",
    "SortJudger",
    "SortTask",
    "decode",
    "encode",
    "score",
    "write_tokenizer",
]

END_TOKEN: Final = "</s>"  # noqa: S105  the end of an answer, not a secret
UNKNOWN_TOKEN: Final = "?"  # noqa: S105
VOCABULARY: Final[tuple[str, ...]] = (END_TOKEN, "=", *"0123456789", *"abcdefghijklmnopqrs", UNKNOWN_TOKEN)
"""Token by id. The letters are there to be avoided: a policy first has to find out what an answer is made of."""
END_ID: Final = 0
MAX_REWARD: Final = 1.0
"""What a policy that sorts gets for every answer."""
_IDS: Final = {token: index for index, token in enumerate(VOCABULARY)}


@dataclass(frozen=True, slots=True)
class SortTask:
    """The size of the task.

    Attributes:
        length: Digits to sort.
        symbols: How many different digits there are, from 0 up.
        max_tokens: Most tokens of an answer; at least `length + 1`.
    """

    length: int = 8
    symbols: int = 6
    max_tokens: int = 16

    def __post_init__(self) -> None:
        """Refuse sizes that make no task.

        Raises:
            ValueError: A size is out of bounds.
        """
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if not 1 <= self.symbols <= 10:  # noqa: PLR2004  digits there are
            raise ValueError(f"symbols must be within 1 to 10, got {self.symbols}")
        if self.max_tokens < self.length + 1:
            raise ValueError(f"max_tokens must leave room for the answer and its end, got {self.max_tokens}")

    @property
    def context(self) -> int:
        """Most tokens of a sequence: digits, `=`, answer."""
        return self.length + 1 + self.max_tokens

    @property
    def chance_reward(self) -> float:
        """The expected reward of a policy that draws every token uniformly from the vocabulary.

        With q = 1/V: an answer ends at its position L with probability (1-q)^(L-1) q, or is cut at `max_tokens`.
        A token before the end is none of END, so it is the wanted digit with probability 1/(V-1); the end itself
        is right where the target ends, at position `length + 1`.
        """
        size = len(VOCABULARY)
        end, digit = 1 / size, 1 / (size - 1)
        target = self.length + 1
        expected = 0.0
        for tokens in range(1, self.max_tokens + 1):
            alive = (1 - end) ** (tokens - 1)
            digits_right = min(tokens - 1, self.length) * digit
            end_right = float(tokens == target)
            expected += alive * end * (digits_right + end_right) / max(tokens, target)
        cut = (1 - end) ** self.max_tokens
        return expected + cut * self.length * digit / self.max_tokens

    def prompts(self, seed: int) -> Iterator[dict[str, str]]:
        """Yield prompt lines without end; the same seed yields the same lines."""
        rng = random.Random(seed)
        alphabet = VOCABULARY[2 : 2 + self.symbols]
        while True:
            digits = rng.choices(alphabet, k=self.length)
            yield {"text": "".join(digits) + "=", "ground_truth": "".join(sorted(digits))}

    def write_prompts(self, path: Path, seed: int, count: int) -> None:
        """Write `count` prompts as JSONL."""
        source = self.prompts(seed)
        with path.open("w", encoding="utf-8") as file:
            for index in range(count):
                file.write(json.dumps({"id": f"sort-{index:06d}", **next(source)}) + "\n")


class SortJudger:
    """The judger of the task, as the service calls it."""

    async def judge(self, sample: JudgedSample) -> float:
        """Compare the response with the sorted digits of `ground_truth`."""
        return score(sample.response_ids, [*encode(str(sample.ground_truth)), END_ID])


def score(answer: Sequence[int], target: Sequence[int]) -> float:
    """Return the share of positions at which both agree, over the longer of the two; 1.0 where both are empty."""
    longest = max(len(answer), len(target))
    if not longest:
        return MAX_REWARD
    right = sum(ours == wanted for ours, wanted in zip(answer, target, strict=False))
    return right / longest


def encode(text: str) -> list[int]:
    """Return the ids of a text, one per character."""
    unknown = _IDS[UNKNOWN_TOKEN]
    return [_IDS.get(character, unknown) for character in text]


def decode(ids: Sequence[int]) -> str:
    """Return the text of ids, special tokens spelled out."""
    return "".join(VOCABULARY[index] for index in ids)


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: one token per character, ids as in `VOCABULARY`."""
    specials = [
        {
            "id": _IDS[token],
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token in (END_TOKEN, UNKNOWN_TOKEN)
    ]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": _IDS, "unk_token": UNKNOWN_TOKEN},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1), encoding="utf-8")
    config = {"eos_token": END_TOKEN, "unk_token": UNKNOWN_TOKEN}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
