"""What vLLM answers, made to measure: for the tests of its dialect."""

from __future__ import annotations

import json
from typing import Any

from rollout_svc.engines import Reply

__all__ = ["REQUEST_ID", "answer", "as_reply", "choice", "chunk", "versions"]

REQUEST_ID = "0123456789abcdef" * 2
"""A wire id."""


def as_reply(content: Any, status: int = 200) -> Reply:
    """Make a reply with this JSON; what JSON has no word for is written as Python does."""
    return Reply(status, json.dumps(content).encode())


def versions(*spans: tuple[object, int, int]) -> list[dict[str, Any]]:
    """Make `weight_versions`."""
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def choice(ids: list[Any], finish: Any, *, values: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Make one choice; the logprobs are `values`, -1.5 each unless given."""
    given = [-1.5] * len(ids) if values is None else values
    entries = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, given, strict=True)]
    return {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions(("7", 0, len(ids))) if ids else [],
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]},
        **fields,
    }


def answer(ids: list[Any], finish: Any, **fields: Any) -> Reply:
    """Make the reply of a finished call."""
    body = {
        "request_id": f"generate-tokens-{REQUEST_ID}",
        "model": "tiny",
        "created": 1795221010,
        "usage": {"prompt_tokens": 4, "total_tokens": 4 + len(ids), "completion_tokens": len(ids)},
        "output_mode": "tokens",
        "choices": [choice(ids, finish, **fields)],
    }
    return as_reply(body)


def chunk(ids: list[Any], finish: Any = None, **fields: Any) -> bytes:
    """Make one payload of a stream; weight versions only where they are given."""
    found = choice(ids, finish, **{"weight_versions": None, **fields})
    body = {"request_id": f"generate-tokens-{REQUEST_ID}", "usage": None, "output_mode": "tokens", "choices": [found]}
    return json.dumps(body).encode()
