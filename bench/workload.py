"""What the service works on in a bench: prompts as token ids, and a judger that costs next to nothing.

The same 128 prompt tokens that the bare client sends; the judger is asynchronous, as a remote reward model's client is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_svc.judging import JudgedSample

PROMPT_TOKENS = 128


def prompts() -> Iterator[dict[str, Any]]:
    """Yield prompts without end, each with an id of its own."""
    ids = list(range(1, PROMPT_TOKENS + 1))
    for number in count():
        yield {"id": f"p{number}", "input_ids": ids, "ground_truth": number}


async def judge(sample: JudgedSample) -> float:
    """Reward the length of the answer, so that the answer has been looked at."""
    return len(sample.response_ids) / 256
