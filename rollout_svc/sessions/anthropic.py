"""Anthropic's messages: requests read, answers written, whole or as a stream of server-sent events.

What is asked for and cannot be promised is refused by name. `temperature` and `top_p` are taken as wishes: a task is
trained with the settings of its own.

Invariants:

- Pure.
- An answer that a client sends back reads as `Said.as_message()` of what was said, calls that cannot be read included.
- A stream put together is the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from rollout_svc.errors import BadRequest
from rollout_svc.sessions.exchange import Answer, Asked, End
from rollout_svc.sessions.reading import (
    count,
    flag,
    fraction,
    items,
    mapping,
    non_empty,
    part,
    refuse_unless,
    texts,
    words,
)
from rollout_svc.sessions.refusals import OVERFLOW, refusal

__all__ = [
    "read_fields",
    "read_messages",
    "read_request",
    "stream_answer",
    "write_answer",
    "write_error",
    "write_models",
]

_PIECE: Final = 512
"""Characters of a delta: the turn is whole before it is told, so pieces only keep events short."""
_UNREADABLE: Final = "unreadable_arguments"
"""Stands for arguments that are no JSON object, which is all that this API can carry."""
_STOP_REASONS: Final[dict[End, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_OVERFLOW: Final = "prompt is too long"
"""How this API tells of messages that do not fit: it has no code for it, so clients look for these words."""
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("top_k", (), "not supported: the task's own sampling is what is trained with"),
    ("mcp_servers", ([],), "servers of tools are the agent's own to ask"),
    ("container", (), "there are no containers here"),
)


def read_request(body: dict[str, Any]) -> Asked:
    """Read the body of `POST …/messages`.

    Raises:
        BadRequest: with the path of the field that is wrong, or that cannot be honoured.
    """
    mapping(body, "body")
    return read_fields(body, read_messages(items(body.get("messages"), "messages"), 0))


def read_messages(given: Sequence[Any], first: int) -> list[dict[str, Any]]:
    """Read a body's messages from the one at `first` on; one may be several of ours."""
    messages = [one for place, item in enumerate(given, first) for one in _messages(item, place)]
    if messages and messages[-1]["role"] == "assistant":
        path = f"messages.{first + len(given) - 1}"
        raise BadRequest.at(path, "the last message is the assistant's: prefill is not supported")
    return messages


def read_fields(body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> Asked:
    """Read a body whose messages are read."""
    for key, allowed, why in _REFUSED:
        if key in body:
            refuse_unless(body, key, allowed, why)
    thinking = mapping(body.get("thinking") or {}, "thinking")
    why = "thinking cannot be told apart: the model thinks as its template has it"
    refuse_unless(thinking, "type", ("disabled", "adaptive"), why, "thinking.type")
    output = mapping(body.get("output_config") or {}, "output_config")
    refuse_unless(output, "format", (), "a format cannot be promised: ask for it in words", "output_config.format")
    _check_management(body)
    if not messages:
        raise BadRequest.at("messages", "expected at least one message")
    return Asked(
        messages=(*_system(body), *messages),
        tools=_tools(body),
        max_tokens=count(body, "max_tokens"),
        temperature=fraction(body, "temperature", 1.0),
        top_p=fraction(body, "top_p", 1.0),
        stop=texts(body.get("stop_sequences"), "stop_sequences"),
        stream=flag(body, "stream"),
        stream_usage=True,
        model=non_empty(body["model"], "model") if body.get("model") is not None else "",
    )


def _check_management(body: Mapping[str, Any]) -> None:
    """Nothing is forgotten here; that earlier thoughts are changes nothing, since none is told apart."""
    management = mapping(body.get("context_management") or {}, "context_management")
    for place, edit in enumerate(items(management.get("edits"), "context_management.edits")):
        path = f"context_management.edits.{place}"
        kind = mapping(edit, path).get("type")
        if not isinstance(kind, str) or not kind.startswith("clear_thinking"):
            raise BadRequest.at(path, "what is forgotten is the agent's own to leave out")


def _system(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = words(body.get("system") or "", "system")
    return [{"role": "system", "content": said}] if said else []


def _messages(item: object, place: int) -> list[dict[str, Any]]:
    """Read one message: results of tools, which this API has a user send, are messages of their own in ours."""
    path = f"messages.{place}"
    given = mapping(item, path)
    role, content = given.get("role"), given.get("content")
    if role == "assistant":
        return [_assistant(content, f"{path}.content")]
    if role == "user":
        return _user(content, f"{path}.content")
    if role == "system":
        return [{"role": "system", "content": words(content, f"{path}.content")}]
    raise BadRequest.at(f"{path}.role", f"expected user, assistant or system, got {role!r:.40}")


def _user(content: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return [{"role": "user", "content": words(content, path)}]
    messages: list[dict[str, Any]] = []
    said: list[str] = []
    for place, item in enumerate(content):
        block, where = mapping(item, f"{path}.{place}"), f"{path}.{place}"
        if block.get("type") != "tool_result":
            said.append(part(block, where))
            continue
        messages += _flushed(said)
        messages.append(_result(block, where))
    return messages + _flushed(said) or [{"role": "user", "content": ""}]


def _flushed(said: list[str]) -> list[dict[str, Any]]:
    message = {"role": "user", "content": "\n".join(said)}
    found = [message] if said else []
    said.clear()
    return found


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What a tool answered; that it failed, a template has no field for: its text says so, or we do."""
    content = block.get("content")
    said = "" if content is None else words(content, f"{path}.content")
    if not said and flag(block, "is_error", f"{path}.is_error"):
        said = "error"
    return {"role": "tool", "content": said, "tool_call_id": non_empty(block.get("tool_use_id"), f"{path}.tool_use_id")}


def _assistant(content: object, path: str) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": words(content, path)}
    said, calls = [], []
    for place, item in enumerate(content):
        block, where = mapping(item, f"{path}.{place}"), f"{path}.{place}"
        if block.get("type") == "tool_use":
            calls.append(_call(block, where))
        else:
            said.append(part(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str):  # it may be empty: a call that is none
        raise BadRequest.at(f"{path}.name", "expected a text")
    arguments = _arguments_of(mapping(block.get("input"), f"{path}.input"), f"{path}.input")
    called = {"name": name, "arguments": arguments}
    return {"id": non_empty(block.get("id"), f"{path}.id"), "type": "function", "function": called}


def _arguments_of(given: dict[str, Any], path: str) -> str:
    if list(given) == [_UNREADABLE] and isinstance(given[_UNREADABLE], str):
        return str(given[_UNREADABLE])
    try:
        return orjson.dumps(given).decode()
    except TypeError as error:
        raise BadRequest.at(path, str(error)) from None


def _input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; what is none, or looks like one that stands for none, is wrapped."""
    try:
        found = orjson.loads(arguments)
        orjson.dumps([[[[[[found]]]]]])  # as deep as it stands in an event
    except (ValueError, TypeError):  # no JSON; nested deeper than it can be written
        found = None
    return found if isinstance(found, dict) and list(found) != [_UNREADABLE] else {_UNREADABLE: arguments}


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that the model is told of; with `tool_choice: none`, none."""
    choice = mapping(body.get("tool_choice") or {}, "tool_choice")
    refuse_unless(choice, "type", ("auto", "none"), "a call cannot be forced: auto or none", "tool_choice.type")
    why = "how many calls a turn has is the model's: one cannot be promised"
    refuse_unless(choice, "disable_parallel_tool_use", (False,), why, "tool_choice.disable_parallel_tool_use")
    tools = [_tool(item, f"tools.{place}") for place, item in enumerate(items(body.get("tools"), "tools"))]
    return () if choice.get("type") == "none" else tuple(tools)


def _tool(item: object, path: str) -> dict[str, Any]:
    """`strict` is left out: what the model writes is what is trained on, and the agent answers a call that is wrong."""
    given = mapping(item, path)
    refuse_unless(given, "type", ("custom",), "tools of the API's own are not there: only yours", f"{path}.type")
    told: dict[str, Any] = {"name": non_empty(given.get("name"), f"{path}.name")}
    if given.get("description") is not None:
        told["description"] = words(given["description"], f"{path}.description")
    told["parameters"] = mapping(given.get("input_schema"), f"{path}.input_schema")
    return {"type": "function", "function": told}


def write_answer(answer: Answer, asked: Asked) -> dict[str, Any]:
    """Write a turn as a message."""
    return {
        **_head(answer, asked),
        "content": [*_blocks(answer)],
        **_ended(answer),
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def stream_answer(answer: Answer, asked: Asked) -> Iterator[bytes]:
    """Write a turn as a stream."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    message = {**_head(answer, asked), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=message)
    yield _event("ping")
    for index, block in enumerate(_blocks(answer)):
        yield from _streamed(index, block)
    yield _event("message_delta", delta=_ended(answer), usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def _head(answer: Answer, asked: Asked) -> dict[str, Any]:
    return {"id": f"msg_{answer.answer_id}", "type": "message", "role": "assistant", "model": asked.model}


def _ended(answer: Answer) -> dict[str, Any]:
    if answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    return {"stop_reason": _STOP_REASONS[answer.end], "stop_sequence": None}


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    """A turn that says nothing at all is an empty text: clients look at the first block."""
    said = answer.said
    if said.content or not said.calls:
        yield {"type": "text", "text": said.content}
    for call in said.calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input_of(call.arguments)}


def _streamed(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    if block["type"] == "text":
        empty, kind, field, whole = {**block, "text": ""}, "text_delta", "text", block["text"]
    else:
        kind, field = "input_json_delta", "partial_json"
        empty, whole = {**block, "input": {}}, orjson.dumps(block["input"]).decode()
    yield _event("content_block_start", index=index, content_block=empty)
    for start in range(0, len(whole), _PIECE):
        yield _event("content_block_delta", index=index, delta={"type": kind, field: whole[start : start + _PIECE]})
    yield _event("content_block_stop", index=index)


def _event(kind: str, **told: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **told}) + b"\n\n"


def write_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Write why there is no answer; `refusals.headers` are the headers that go with it."""
    told = refusal(error)
    kind = _ERRORS.get(told.status, "api_error")
    message = f"{_OVERFLOW}: {told.message}" if told.code == OVERFLOW else told.message
    return told.status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def write_models(name: str) -> dict[str, Any]:
    """Write the list of the one model there is."""
    model = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
    return {"data": [model], "has_more": False, "first_id": name, "last_id": name}
