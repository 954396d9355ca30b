"""What the service works on in a bench: the same 128 prompt tokens that the bare client sends.

The ground truth is a list of ids, for the default judger `exact` to compare the answer's ids with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

PROMPT_TOKENS = 128


def prompts() -> Iterator[dict[str, Any]]:
    """Yield prompts without end, each with an id of its own."""
    ids = list(range(1, PROMPT_TOKENS + 1))
    for number in count():
        yield {"id": f"p{number}", "input_ids": ids, "ground_truth": ids}
