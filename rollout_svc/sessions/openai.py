"""OpenAI's chat completions: requests read, answers written, whole or as a stream of server-sent events.

What is asked for and cannot be promised is refused by name. `temperature`, `top_p` and `seed` are taken as wishes: a
task is trained with the settings of its own.

Invariants:

- Pure, but for the time that `created` tells.
- An answer that a client sends back, however it spells it, reads as `Said.as_message()` of what was said.
- A stream put together is the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from rollout_svc.errors import BadRequest
from rollout_svc.sessions.exchange import Answer, Asked
from rollout_svc.sessions.reading import (
    canonical,
    count,
    flag,
    fraction,
    items,
    mapping,
    non_empty,
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
_OVERFLOW: Final = "This model's maximum context length is exceeded"
"""The beginning of what this API says of messages that do not fit: some clients read it, and not the code."""
_SAID: Final = ("text", "refusal")
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("n", (1,), "one answer a turn: n > 1 is not supported"),
    ("logprobs", (False,), "logprobs are recorded with the sample, not told to the agent"),
    ("top_logprobs", (0,), "logprobs are recorded with the sample, not told to the agent"),
    ("frequency_penalty", (0, 0.0), "not supported: the task's own sampling is what is trained with"),
    ("presence_penalty", (0, 0.0), "not supported: the task's own sampling is what is trained with"),
    ("top_k", (), "not supported: the task's own sampling is what is trained with"),
    ("logit_bias", ({},), "not supported: the task's own sampling is what is trained with"),
    ("parallel_tool_calls", (True,), "how many calls a turn has is the model's: false cannot be promised"),
    ("modalities", (["text"], []), "text only"),
    ("audio", (), "text only"),
    ("web_search_options", (), "there is no web search here"),
    ("moderation", (), "there is no moderation here"),
    ("functions", ([],), "deprecated and not supported: use tools"),
    ("function_call", (), "deprecated and not supported: use tools"),
)


def read_request(body: dict[str, Any]) -> Asked:
    """Read the body of `POST …/chat/completions`.

    Raises:
        BadRequest: with the path of the field that is wrong, or that cannot be honoured.
    """
    mapping(body, "body")
    return read_fields(body, read_messages(items(body.get("messages"), "messages"), 0))


def read_messages(given: Sequence[Any], first: int) -> list[dict[str, Any]]:
    """Read a body's messages from the one at `first` on."""
    return [_message(item, f"messages.{place}") for place, item in enumerate(given, first)]


def read_fields(body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> Asked:
    """Read a body whose messages are read."""
    for key, allowed, why in _REFUSED:
        if key in body:
            refuse_unless(body, key, allowed, why)
    if body.get("response_format") is not None:
        wanted = mapping(body["response_format"], "response_format")
        why = "a format cannot be promised: ask for it in words"
        refuse_unless(wanted, "type", ("text",), why, "response_format.type")
    if not messages:
        raise BadRequest.at("messages", "expected at least one message")
    options = mapping(body.get("stream_options") or {}, "stream_options")
    key = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return Asked(
        messages=tuple(messages),
        tools=_tools(body),
        max_tokens=count(body, key),
        temperature=fraction(body, "temperature", 2.0),
        top_p=fraction(body, "top_p", 1.0),
        stop=texts(body.get("stop"), "stop"),
        stream=flag(body, "stream"),
        stream_usage=flag(options, "include_usage", "stream_options.include_usage"),
        model=non_empty(body["model"], "model") if body.get("model") is not None else "",
    )


def _message(item: object, path: str) -> dict[str, Any]:
    given = mapping(item, path)
    role = given.get("role")
    content = f"{path}.content"
    if role == "assistant":
        return _assistant(given, path)
    if role == "tool":
        call = non_empty(given.get("tool_call_id"), f"{path}.tool_call_id")
        message = {"role": role, "content": words(given.get("content"), content), "tool_call_id": call}
    elif role in ("system", "developer", "user"):
        plain = "user" if role == "user" else "system"  # chat templates know no developers
        message = {"role": plain, "content": words(given.get("content"), content)}
    else:
        expected = "expected system, developer, user, assistant or tool"
        raise BadRequest.at(f"{path}.role", f"{expected}, got {role!r:.40}")
    name = given.get("name")
    return message if name is None else message | {"name": non_empty(name, f"{path}.name")}


def _assistant(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Its `name` is left out: a client's own label, which the model did not say."""
    refuse_unless(given, "function_call", (), "deprecated and not supported: use tool_calls", f"{path}.function_call")
    refuse_unless(given, "audio", (), "text only", f"{path}.audio")
    said, refused = given.get("content"), given.get("refusal")
    content = "" if said is None else words(said, f"{path}.content", between="", kinds=_SAID)
    if not content and refused is not None:  # another model's, in a history that begins with its words
        content = words(refused, f"{path}.refusal")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = items(given.get("tool_calls"), f"{path}.tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, f"{path}.tool_calls.{place}") for place, call in enumerate(calls)]
    return message


def _call(item: object, path: str) -> dict[str, Any]:
    given = mapping(item, path)
    refuse_unless(given, "type", ("function",), "only functions are called here", f"{path}.type")
    function = mapping(given.get("function"), f"{path}.function")
    name, arguments = function.get("name"), function.get("arguments", "")
    if not isinstance(name, str) or not isinstance(arguments, str):  # a name may be empty: a call that is none
        raise BadRequest.at(f"{path}.function", "expected a name and arguments, both texts")
    return {
        "id": non_empty(given.get("id"), f"{path}.id"),
        "type": "function",
        "function": {"name": name, "arguments": canonical(arguments)},
    }


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that the model is told of; with `tool_choice: none`, none."""
    refuse_unless(body, "tool_choice", ("auto", "none"), "a call cannot be forced: auto or none")
    tools = [_tool(item, f"tools.{place}") for place, item in enumerate(items(body.get("tools"), "tools"))]
    return () if body.get("tool_choice") == "none" else tuple(tools)


def _tool(item: object, path: str) -> dict[str, Any]:
    """`strict` is left out: what the model writes is what is trained on, and the agent answers a call that is wrong."""
    given = mapping(item, path)
    if given.get("type") != "function":
        raise BadRequest.at(f"{path}.type", f"only functions can be called here, got {given.get('type')!r:.40}")
    function = mapping(given.get("function"), f"{path}.function")
    told: dict[str, Any] = {"name": non_empty(function.get("name"), f"{path}.function.name")}
    if function.get("description") is not None:
        told["description"] = words(function["description"], f"{path}.function.description")
    if function.get("parameters") is not None:
        told["parameters"] = mapping(function["parameters"], f"{path}.function.parameters")
    return {"type": "function", "function": told}


def write_answer(answer: Answer, asked: Asked, *, created: int | None = None) -> dict[str, Any]:
    """Write a turn as a chat completion.

    Args:
        answer: the turn.
        asked: what it answers.
        created: seconds since 1970; None: now.
    """
    said = answer.said
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [call.as_json() for call in said.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.end}
    return {
        "id": _id(answer),
        "object": "chat.completion",
        "created": int(time.time()) if created is None else created,
        "model": asked.model,
        "choices": [choice],
        "usage": _usage(answer),
    }


def stream_answer(answer: Answer, asked: Asked, *, created: int | None = None) -> Iterator[bytes]:
    """Write a turn as a stream; the arguments are those of `write_answer`."""
    begun = int(time.time()) if created is None else created
    head = {"id": _id(answer), "object": "chat.completion.chunk", "created": begun, "model": asked.model}
    usage: dict[str, Any] = {"usage": None} if asked.stream_usage else {}
    for delta in _deltas(answer):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield _event({**head, "choices": [choice], **usage})
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.end}
    yield _event({**head, "choices": [last], **usage})
    if asked.stream_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    said = answer.said
    yield {"role": "assistant", "content": None if said.calls and not said.content else "", "refusal": None}
    for start in range(0, len(said.content), _PIECE):
        yield {"content": said.content[start : start + _PIECE]}
    for place, call in enumerate(said.calls):
        begun = {"index": place, "id": call.call_id, "type": "function"}
        yield {"tool_calls": [{**begun, "function": {"name": call.name, "arguments": ""}}]}
        for start in range(0, len(call.arguments), _PIECE):
            piece = call.arguments[start : start + _PIECE]
            yield {"tool_calls": [{"index": place, "function": {"arguments": piece}}]}


def _id(answer: Answer) -> str:
    return f"chatcmpl-{answer.answer_id}"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def write_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Write why there is no answer; `refusals.headers` are the headers that go with it."""
    told = refusal(error)
    kind = "server_error" if told.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - of HTTP
    code = "invalid_api_key" if told.status == 401 else told.code  # noqa: PLR2004 - of HTTP
    message = f"{_OVERFLOW}: {told.message}" if told.code == OVERFLOW else told.message
    return told.status, {"error": {"message": message, "type": kind, "param": told.param, "code": code}}


def write_models(name: str) -> dict[str, Any]:
    """Write the list of the one model there is."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rollout_svc"}],
    }
