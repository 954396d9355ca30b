"""OpenAI's chat completions: a request read, an answer written, whole and as a stream.

Invariant: pure; what cannot be read is a BadRequest that names the field.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson

from rollout_svc.errors import BadRequest, SampleFailure, ServiceError
from rollout_svc.sessions.exchange import Answer, Asked

__all__ = ["read_request", "stream_answer", "write_answer", "write_error"]

_KEPT = ("role", "tool_calls", "tool_call_id", "name")


def read_request(body: Any) -> Asked:
    """Read a request's JSON."""
    if not isinstance(body, dict):
        raise BadRequest.at("", "expected an object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequest.at("messages", "expected a list of messages")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest.at("max_tokens", "expected a positive number of tokens")
    stop = body.get("stop") or ()
    options = body.get("stream_options") or {}
    return Asked(
        messages=tuple(_message(message, place) for place, message in enumerate(messages)),
        tools=tuple(body.get("tools") or ()),
        max_tokens=limit,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        model=str(body.get("model", "")),
    )


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise BadRequest.at(f"messages.{place}.role", "expected a role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return {key: message[key] for key in _KEPT if message.get(key)} | {"content": content or ""}


def write_answer(answer: Answer, asked: Asked) -> dict[str, Any]:
    """Write a whole answer."""
    choice = {"index": 0, "message": answer.said.as_message(), "finish_reason": answer.end, "logprobs": None}
    return _head(answer, asked, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def stream_answer(answer: Answer, asked: Asked) -> Iterator[bytes]:
    """Write an answer as server-sent events."""
    head = _head(answer, asked, "chat.completion.chunk")
    message = answer.said.as_message()
    calls = [call | {"index": place} for place, call in enumerate(message.pop("tool_calls", []))]
    delta = message | ({"tool_calls": calls} if calls else {})
    yield _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.end}]})
    if asked.stream_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def write_error(error: ServiceError | SampleFailure) -> tuple[int, dict[str, Any]]:
    """Write an error, with its status."""
    if isinstance(error, ServiceError):
        status, kind = error.status, error.type
    else:
        status, kind = (400 if error.reason in ("bad_prompt", "too_long") else 502), error.reason
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": kind}}


def _head(answer: Answer, asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.answer_id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, made = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
