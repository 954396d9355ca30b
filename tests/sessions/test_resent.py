"""What a client sends again is not read again, and what comes out is what reading all of it comes to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from rollout_svc.errors import BadRequest
from rollout_svc.sessions import anthropic, openai
from rollout_svc.sessions.exchange import Asked
from rollout_svc.sessions.resent import Reader, Resent

USER = {"role": "user", "content": 'a "quoted" ] } \\ text, ünlike "messages": ['}
SAID = {"role": "assistant", "content": "said [", "refusal": None}
MORE = {"role": "user", "content": [{"type": "text", "text": "parts"}, {"type": "text", "text": "]"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "}"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["messages"]}}}


class Counting:
    """OpenAI's reader, which tells how many messages it was given."""

    def __init__(self) -> None:
        self.read = 0

    def read_request(self, body: Any) -> Asked:
        self.read += len(body["messages"])
        return openai.read_request(body)

    def read_messages(self, given: Sequence[Any], first: int) -> list[dict[str, Any]]:
        self.read += len(given)
        return openai.read_messages(given, first)

    def read_fields(self, body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> Asked:
        return openai.read_fields(body, messages)


def outcome(read: Any) -> Any:
    """What reading comes to, a refusal by its words."""
    try:
        return read()
    except BadRequest as error:
        return str(error), error.detail
    except ValueError:
        return "not JSON"


def check(resent: Resent, raw: bytes, reader: Reader = openai) -> None:
    """What comes out of a body is what reading it whole comes to."""
    assert outcome(lambda: resent.read(raw, reader)) == outcome(lambda: reader.read_request(orjson.loads(raw)))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("last", [False, True])
def test_only_what_is_new_is_read(*, last: bool, indent: int | None) -> None:
    """Wherever a client puts its messages, each is read once, and comes out as the same object ever after."""
    resent, reader = Resent(), Counting()
    messages: list[dict[str, Any]] = []
    before: tuple[dict[str, Any], ...] = ()
    for turn in range(6):
        messages += [USER] if not turn else [CALLED, RESULT, SAID, MORE]
        fields = {"model": "m", "tools": [TOOL], "stop": ["]"]}
        body = {**fields, "messages": messages} if last else {"messages": messages, **fields, "max_tokens": 5 + turn}
        raw = json.dumps(body, indent=indent).encode()
        asked = resent.read(raw, reader)
        assert asked == openai.read_request(json.loads(raw))
        assert all(one is other for one, other in zip(before, asked.messages, strict=False))
        before = asked.messages
    assert reader.read == len(messages)


def test_both_apis_are_read() -> None:
    """Anthropic's messages, of which one may be several of ours, and its system, which may change, come out alike."""
    resent = Resent()
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"messages": []}}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "9"}, *MORE["content"]],
    }
    messages: list[dict[str, Any]] = [USER]
    for system in ("one", "one", "two", ""):
        check(resent, orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages, "system": system}), anthropic)
        messages += [{"role": "assistant", "content": [{"type": "text", "text": "x"}, use]}, result]
    check(
        resent,
        orjson.dumps({"max_tokens": 9, "messages": [*messages, {"role": "assistant", "content": "no"}]}),
        anthropic,
    )
    check(resent, orjson.dumps({"messages": [USER]}))
    check(resent, orjson.dumps({"messages": [USER]}), anthropic)


ONE = orjson.dumps(USER)
BEGUN = b'{"n":1,"messages":[%b]}' % ONE
HEAD = BEGUN[:-2]


@pytest.mark.parametrize(
    "raw",
    [
        BEGUN,
        HEAD + b"]",
        HEAD + b',5],"model":"m"}',
        HEAD + b'.5],"model":"m"}',
        HEAD + b"%b]}" % ONE,
        HEAD + b",]}",
        HEAD + b"].5}",
        HEAD + b"]} {}",
        HEAD + b"]]}",
        HEAD + b',{"role":"assistant","content":"]}',
        HEAD + b',{"role":"bot"}]}',
        HEAD + b'],"messages":[]}',
        HEAD + b'],"messages":[{"role":"user","content":"other"}]}',
        HEAD + b'],"mess\\u0061ges":[{"role":"user","content":"other"}]}',
        HEAD + b'],"n":2}',
        HEAD + b'],"":[],"model":"m"}',
        HEAD + b',{"role":"user","content":"\xff"}]}',
        BEGUN.replace(b'"n":1', b'"n":1,"\\"messages":[5]'),
        b'{"\\"messages":[%b],"messages":[%b]}' % (ONE, ONE),
        b'{"messages":[],"\\"messages":[%b]}' % ONE,
        b'{"metadata":{"messages":[%b]},"messages":[%b,%b]}' % (ONE, ONE, ONE),
        b'{"user":"\\"messages\\":[","messages":[%b]}' % ONE,
        b'{"messages":[%b],"messages":[]}' % ONE,
        b'{"messages":[]}',
        b'{"messages":{}}',
        b"[]",
        b"null",
        b"",
        b'"messages":[]',
        b"]",
    ],
)
def test_a_wrong_cut_is_none(raw: bytes) -> None:
    """What is no JSON, tells its messages twice or hides them is answered as ever, first or after another body."""
    check(Resent(), raw)
    resent = Resent()
    check(resent, BEGUN)
    check(resent, raw)
    check(resent, HEAD + b",%b]}" % ONE)


def test_any_change_is_noticed() -> None:
    """A body that differs in any byte from the last one comes out as it would alone."""
    first = orjson.dumps({"model": "m", "messages": [USER, SAID, MORE], "stop": ["a"]})
    longer = orjson.dumps({"model": "m", "messages": [USER, SAID, MORE, CALLED, RESULT], "stop": ["a"]})
    for place in range(len(longer)):
        for other in b'],"}x':
            resent = Resent()
            check(resent, first)
            check(resent, longer[:place] + bytes([other]) + longer[place + 1 :])


def test_a_long_beginning_is_read_whole() -> None:
    """So much that looking through it would hold the event loop is left to the parser, and comes out alike."""
    resent, long = Resent(), {"role": "user", "content": "x" * (1 << 18)}
    for messages in ([long], [long, SAID, USER], [USER], [USER, SAID, long], [USER, SAID, long, SAID, USER]):
        check(resent, orjson.dumps({"messages": messages}))
