"""Anthropic's messages: a request read, an answer written, whole and as a stream.

Invariant: pure; what cannot be read is a BadRequest that names the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from rollout_svc.errors import SampleFailure, ServiceError
from rollout_svc.sessions import openai
from rollout_svc.sessions.exchange import Answer, Asked

__all__ = ["read_request", "stream_answer", "write_answer", "write_error"]

_ENDS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_request(body: Any) -> Asked:
    """Read a request's JSON."""
    asked = openai.read_request(body)
    system = body.get("system")
    first = ({"role": "system", "content": system},) if isinstance(system, str) and system else ()
    stop = body.get("stop_sequences") or ()
    return asked._replace(messages=(*first, *asked.messages), stop=tuple(stop))


def write_answer(answer: Answer, asked: Asked) -> dict[str, Any]:
    """Write a whole answer."""
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.said.content}] if answer.said.content else []
    for call in answer.said.calls:
        given = {} if call.problem else orjson.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": _ENDS[answer.end],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def stream_answer(answer: Answer, asked: Asked) -> Iterator[bytes]:
    """Write an answer as server-sent events."""
    whole = write_answer(answer, asked)
    yield _event("message_start", {"message": whole | {"content": [], "stop_reason": None}})
    for place, block in enumerate(whole["content"]):
        yield _event("content_block_start", {"index": place, "content_block": block | {"text": ""}})
        yield _event(
            "content_block_delta", {"index": place, "delta": {"type": "text_delta", "text": block.get("text")}}
        )
        yield _event("content_block_stop", {"index": place})
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", {"delta": ends, "usage": whole["usage"]})
    yield _event("message_stop", {})


def write_error(error: ServiceError | SampleFailure) -> tuple[int, dict[str, Any]]:
    """Write an error, with its status."""
    status, said = openai.write_error(error)
    return status, {"type": "error", "error": {"type": said["error"]["type"], "message": said["error"]["message"]}}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + orjson.dumps({"type": kind} | data) + b"\n\n"
