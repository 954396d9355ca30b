"""What a bare client says to an engine and reads from it, by dialect: the least that gives ids and their logprobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROMPT_TOKENS", "RESPONSE_TOKENS", "WIRES", "Wire"]

PROMPT_TOKENS = 128
"""Prompt of every benched request, in tokens."""
RESPONSE_TOKENS = 256
"""Budget of every benched request, in tokens."""
_LEAST_SESSION = 10**9
"""LMDeploy refuses smaller session ids at random."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One dialect.

    Attributes:
        path: where it generates.
        request: encodes a request, from prompt ids and an id of 32 hex characters.
        read: takes ids and logprobs from a decoded answer.
    """

    path: str
    request: Callable[[list[int], str], bytes]
    read: Callable[[Any], tuple[list[int], list[float]]]


def _sglang(prompt_ids: list[int], wire_id: str) -> bytes:
    return orjson.dumps(
        {
            "rid": wire_id,
            "input_ids": prompt_ids,
            "sampling_params": {"max_new_tokens": RESPONSE_TOKENS, "temperature": 1.0, "top_p": 1.0},
            "return_logprob": True,
            "stream": False,
        }
    )


def _vllm(prompt_ids: list[int], wire_id: str) -> bytes:
    return orjson.dumps(
        {
            "request_id": wire_id,
            "token_ids": prompt_ids,
            "sampling_params": {"max_tokens": RESPONSE_TOKENS, "temperature": 1.0, "top_p": 1.0, "logprobs": 0},
            "stream": False,
        }
    )


def _lmdeploy(prompt_ids: list[int], wire_id: str) -> bytes:
    return orjson.dumps(
        {
            "session_id": _LEAST_SESSION + int(wire_id[:12], 16),
            "input_ids": prompt_ids,
            "max_tokens": RESPONSE_TOKENS,
            "temperature": 1.0,
            "top_p": 1.0,
            "return_logprob": True,
            "include_stop_str_in_output": True,
            "stream": False,
        }
    )


def _read_pairs(answer: Any) -> tuple[list[int], list[float]]:
    return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]


def _read_choice(answer: Any) -> tuple[list[int], list[float]]:
    choice = answer["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


WIRES = {
    "sglang": Wire("generate", _sglang, _read_pairs),
    "vllm": Wire("inference/v1/generate", _vllm, _read_choice),
    "lmdeploy": Wire("generate", _lmdeploy, _read_pairs),
}
"""By the name a worker's `dialect` has."""
