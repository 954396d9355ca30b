"""Anthropic's messages: read, written, streamed, and read again."""

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
from rollout_svc.sessions.anthropic import read_request, stream_answer, write_answer, write_models
from rollout_svc.sessions.exchange import Answer, Asked
from tests.support.turns import answered, answers, broken, spelled

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}, "strict": True}


def read(*messages: dict[str, Any], **fields: Any) -> Asked:
    """Read a request as it comes over the wire."""
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), **fields}
    return read_request(json.loads(json.dumps(body)))


def together(events: Iterable[bytes]) -> dict[str, Any]:
    """Put a stream together as clients do."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    for event in events:
        kind, data = event.decode().strip().split("\n", 1)
        told = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {told['type']}"
        if told["type"] == "message_start":
            message = told["message"]
        elif told["type"] == "content_block_start":
            assert told["index"] == len(message["content"])
            message["content"].append(told["content_block"])
            parts = []
        elif told["type"] == "content_block_delta":
            parts.append(told["delta"].get("text", told["delta"].get("partial_json")))
        elif told["type"] == "content_block_stop":
            block = message["content"][told["index"]]
            block |= {"text": "".join(parts)} if block["type"] == "text" else {"input": json.loads("".join(parts))}
        elif told["type"] == "message_delta":
            message |= told["delta"]
            message["usage"] |= told["usage"]
    return message


def sent_back(content: list[dict[str, Any]], how: int) -> Any:
    """Spell an answer as one of many clients does."""
    blocks = json.loads(json.dumps(content))
    if how == 1:  # with what may be told to a cache
        blocks[-1] |= {"cache_control": {"type": "ephemeral"}}
    elif how == 2 and [block["type"] for block in blocks] == ["text"]:
        return blocks[0]["text"]
    elif how == 4 and blocks[0]["type"] == "text":  # in more blocks than it came in
        said = blocks[0]["text"]
        return [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}, *blocks[1:]]
    elif how == 3:  # empty texts left out, and nothing that is null
        return [block | {"citations": None} for block in blocks if block.get("text") != ""]
    return blocks


@given(answers(), st.integers(0, 4), st.booleans())
def test_what_a_client_sends_back_is_what_was_said(answer: Answer, how: int, streamed: bool) -> None:
    """P6: however it is spelled, streamed or not, it is no rewriting: the conversation goes on by exact ids."""
    asked = read(USER, tools=[TOOL])
    told = together(stream_answer(answer, asked)) if streamed else write_answer(answer, asked)
    back = {"role": "assistant", "content": sent_back(told["content"], how)}
    given = read(USER, back, {"role": "user", "content": "on"}, tools=[TOOL])
    assert is_continuation(spelled(asked, answer), given.messages)
    assert given.tools == asked.tools


@given(answers())
def test_a_stream_is_the_whole_answer(answer: Answer) -> None:
    """The events put together are the message."""
    asked = read(USER, stream=True)
    assert together(stream_answer(answer, asked)) == write_answer(answer, asked)


def test_an_answer_in_full() -> None:
    """The shape of the API, key by key."""
    asked = read(USER)
    told = write_answer(answered('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', 2), asked)
    called = {"type": "tool_use", "id": "call_2_0", "name": "add", "input": {"a": 1}}
    assert told == {
        "id": "msg_s-2",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "so"}, called],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 3},
    }
    assert write_answer(answered("x", end="length"), asked)["stop_reason"] == "max_tokens"
    assert write_models("m")["data"][0]["id"] == "m"


def test_a_text_that_was_stopped_at_is_named() -> None:
    """Whole and as a stream, as the API has it."""
    asked, answer = read(USER), answered("so")._replace(stopped_by="See:")
    told = write_answer(answer, asked)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "See:")
    assert together(stream_answer(answer, asked)) == told


def test_nothing_at_all_is_a_block() -> None:
    """Clients look at the first one; a turn that only calls has none of text."""
    assert write_answer(answered(""), read(USER))["content"] == [{"type": "text", "text": ""}]
    called = write_answer(answered('<tool_call>{"name": "add"}</tool_call>'), read(USER))["content"]
    assert [block["type"] for block in called] == ["tool_use"]


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("{oops", {"unreadable_arguments": "{oops"}),
        ('{"name": "f", "arguments": "no"}', {"unreadable_arguments": "no"}),
        ('{"name": "f", "arguments": {"unreadable_arguments": "x"}}', None),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 251 + "]" * 251}}}}}', None),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 300 + "]" * 300}}}}}', None),
    ],
    ids=["no JSON", "no object", "in disguise", "deep", "too deep"],
)
def test_arguments_that_are_no_object(written: str, given: dict[str, Any] | None) -> None:
    """P6: they are told as an object, since the API has no other, and read again as the text they were."""
    asked, answer = read(USER), answered(f"<tool_call>{written}</tool_call>")
    content = write_answer(answer, asked)["content"]
    assert together(stream_answer(answer, asked))["content"] == content
    if given is not None:
        assert content[0]["input"] == given
    assert read(USER, {"role": "assistant", "content": content}, USER).messages[1] == answer.said.as_message()


def test_what_a_user_says_around_results_keeps_its_place() -> None:
    """Text, a result, text: three messages, in that order."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    content = [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}]
    assert [one["content"] for one in read({"role": "user", "content": content}).messages] == ["a", "3", "b"]


def test_the_events_of_a_stream_in_order() -> None:
    """As the API tells them."""
    events = [event.split(b"\n")[0].decode() for event in stream_answer(answered("x"), read(USER))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert events == [f"event: {kind}" for kind in ("message_start", "ping", *block, "message_delta", "message_stop")]


def test_what_is_asked_for() -> None:
    """System as blocks, results of tools as messages of their own, tools in the form that templates take."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
    failed = {"type": "tool_result", "tool_use_id": "d", "is_error": True}
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief", "cache_control": {}}]
    content = [result, failed, {"type": "text", "text": "go"}, {"type": "text", "text": "on"}]
    fields = {"stop_sequences": ["\n"], "temperature": 1, "metadata": {}, "thinking": {"type": "disabled"}}
    asked = read(USER, {"role": "user", "content": content}, system=system, tools=[TOOL], **fields)
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert asked == Asked(
        (
            {"role": "system", "content": "be\nbrief"},
            USER,
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            {"role": "tool", "content": "error", "tool_call_id": "d"},
            {"role": "user", "content": "go\non"},
        ),
        tools=({"type": "function", "function": function},),
        max_tokens=9,
        temperature=1.0,
        stop=("\n",),
        stream_usage=True,
        model="m",
    )
    assert read(USER, tools=[TOOL], tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"top_k": 5}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"system": 3}, "system"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_1"}, {"type": "clear_tool_uses_1"}]}},
            "context_management.edits.1",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image"}]}]},
            "messages.0.content.1",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
            "messages.0.content.0.input",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    """P35: a 400 with the path of the field, as the client knows it."""
    with pytest.raises(BadRequest) as refused:
        read_request({"model": "m", "max_tokens": 9, "messages": [USER], **fields})
    assert refused.value.detail[0]["path"] == path


CALL = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
WHOLE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "x"}],
    "messages": [
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3", "is_error": False}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
}


@given(broken([WHOLE]))
def test_a_broken_request_is_refused_or_read(body: dict[str, Any]) -> None:
    """P35: whatever stands where something else should be, it is a 400 that names a field, or no mistake."""
    with contextlib.suppress(BadRequest):
        read_request(body)
