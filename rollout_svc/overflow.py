"""Whether an engine refused a prompt because it does not fit its context; each engine has its own words for it.

| engine | says |
|---|---|
| SGLang, built-in | `The input (30 tokens) is longer than the model's context length (20 tokens).` |
| vLLM | `The decoder prompt (length 30) is longer than the maximum model length of 20.`, `This model's maximum context length is …`, `You passed 30 input tokens … the model's context length is only 20 tokens` |
| LMDeploy | `The request exceeds the model context length.` |

Invariant: pure; a refusal for anything else is none, whatever it is about.
"""  # noqa: E501 - a row is a line

from __future__ import annotations

import re
from typing import Final

from rollout_svc.errors import SampleFailure

__all__ = ["is_overflow"]

_REFUSED: Final = "rejected_by_engine"
_FULL: Final = re.compile(
    r"context[ _](length|len|window|size|limit)|(prompt|input|request)\b.{0,40}\b(too long|longer than)"
    r"|max_model_len|session_len|(maximum|max) .{0,20}length",
    re.IGNORECASE,
)


def is_overflow(failure: SampleFailure) -> bool:
    """Whether this is an engine's refusal of a prompt that is too long for it."""
    return failure.reason == _REFUSED and _FULL.search(failure.message) is not None
