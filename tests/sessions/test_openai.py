"""OpenAI's chat completions: read, written, streamed, and read again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.conversation import is_continuation
from rollout_svc.errors import BadRequest
from rollout_svc.sessions.exchange import Answer, Asked
from rollout_svc.sessions.openai import read_request, stream_answer, write_answer, write_models
from tests.support.turns import answered, answers, broken, spelled

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


def read(*messages: dict[str, Any], **fields: Any) -> Asked:
    """Read a request as it comes over the wire."""
    return read_request(json.loads(json.dumps({"model": "m", "messages": list(messages), **fields})))


def together(events: Iterable[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a stream together as clients do: the message, and its last words."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    last: dict[str, Any] = {}
    *chunks, done = list(events)
    assert done == b"data: [DONE]\n\n"
    for chunk in chunks:
        told = json.loads(chunk.removeprefix(b"data: "))
        last |= {"usage": told.get("usage")}
        for choice in told["choices"]:
            last |= {"finish_reason": choice["finish_reason"]}
            _grow(message, choice["delta"])
    return message, last


def _grow(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message |= {key: delta[key] for key in ("role",) if key in delta}
    if delta.get("content") is not None:
        message["content"] = (message["content"] or "") + delta["content"]
    for call in delta.get("tool_calls", []):
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append(call)
        else:
            known = message["tool_calls"][call["index"]]
            known["function"]["arguments"] += call["function"]["arguments"]


def sent_back(message: dict[str, Any], how: int) -> dict[str, Any]:
    """Spell an answer as one of many clients does."""
    message = json.loads(json.dumps(message))
    said = message["content"] or ""
    if how == 1:  # a model dump, whole
        message |= {"annotations": None, "audio": None, "function_call": None, "content": said}
    elif how == 2:  # parts, and a label
        message |= {"content": [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}], "name": "me"}
    elif how == 3 and not said:
        del message["content"]
    elif how == 4:  # arguments parsed, and written again
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = _again(call["function"]["arguments"])
    return message


def _again(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=True, indent=1)
    except ValueError:
        return arguments


@given(answers(), st.integers(0, 4), st.booleans())
def test_what_a_client_sends_back_is_what_was_said(answer: Answer, how: int, streamed: bool) -> None:
    """P6: however it is spelled, streamed or not, it is no rewriting: the conversation goes on by exact ids."""
    asked = read(USER, tools=[TOOL])
    if streamed:
        message, _ = together(stream_answer(answer, asked))
    else:
        message = write_answer(answer, asked)["choices"][0]["message"]
    given = read(USER, sent_back(message, how), {"role": "user", "content": "on"}, tools=[TOOL])
    assert is_continuation(spelled(asked, answer), given.messages)
    assert given.tools == asked.tools


@given(answers(), st.booleans())
def test_a_stream_is_the_whole_answer(answer: Answer, usage: bool) -> None:
    """The pieces put together are the message; the usage comes where it is asked for."""
    asked = read(USER, stream=True, stream_options={"include_usage": usage})
    whole = write_answer(answer, asked, created=0)
    message, last = together(stream_answer(answer, asked))
    expected = whole["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected["content"])
    calls = [{key: call[key] for key in ("id", "type", "function")} for call in message["tool_calls"]]
    assert calls == expected.get("tool_calls", [])
    assert last == {"finish_reason": answer.end, "usage": whole["usage"] if usage else None}


def test_an_answer_in_full() -> None:
    """The shape of the API, key by key."""
    asked = read(USER)
    told = write_answer(answered('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', 2), asked, created=0)
    call = {"id": "call_2_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    assert told == {
        "id": "chatcmpl-s-2",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
    assert write_models("m")["data"][0]["id"] == "m"


def test_what_is_asked_for() -> None:
    """Tools without what templates have no use for, limits, stops; unknown fields change nothing."""
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]}
    developer = {"role": "developer", "content": "be brief"}
    fields = {"max_completion_tokens": 5, "stop": "\n", "temperature": 0, "user": "u", "store": False, "n": 1}
    asked = read(developer, USER, tool, tools=[TOOL], tool_choice="auto", **fields)
    function = {"name": "add", "parameters": {"type": "object"}}
    assert asked == Asked(
        ({"role": "system", "content": "be brief"}, USER, {"role": "tool", "content": "3", "tool_call_id": "c"}),
        tools=({"type": "function", "function": function},),
        max_tokens=5,
        temperature=0.0,
        stop=("\n",),
        model="m",
    )
    assert read(USER, tools=[TOOL], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_k": 5}, "top_k"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format.type"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    """P35: a 400 with the path of the field."""
    with pytest.raises(BadRequest) as refused:
        read_request({"model": "m", "messages": [USER], **fields})
    assert refused.value.detail[0]["path"] == path


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
WHOLE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "x"}], "name": "n"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "stop": ["x"],
    "max_tokens": 3,
    "temperature": 1.0,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
}


@given(broken([WHOLE]))
def test_a_broken_request_is_refused_or_read(body: dict[str, Any]) -> None:
    """P35: whatever stands where something else should be, it is a 400 that names a field, or no mistake."""
    with contextlib.suppress(BadRequest):
        read_request(body)
