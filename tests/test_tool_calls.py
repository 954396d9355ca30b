"""Calls of tools in a model's text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.tool_calls import Said, ToolFormat, read_said

NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(NAMES, st.integers() | st.text(st.characters(exclude_categories=["Cs"])), max_size=3)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
def test_calls_come_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Names and arguments, in order, beside what was said; ids differ, and are the same when it is read again."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if any("</tool_call>" in text for text in written):
        return
    text = "Let me see. " + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in written)
    said = read_said(text, 3)
    assert said.content == "Let me see."
    assert [(call.name, json.loads(call.arguments), call.problem) for call in said.calls] == [
        (name, arguments, "") for name, arguments in calls
    ]
    assert len({call.call_id for call in said.calls}) == len(calls)
    assert read_said(text, 3) == said
    assert read_said(text, 4).calls[0].call_id != said.calls[0].call_id


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{oops}</tool_call>", "no JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "expected an object with a name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "expected an object with a name"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments: no JSON"),
        ('<tool_call>{"name": "add", "argu', "no JSON"),
    ],
)
def test_a_call_that_is_none_is_told(text: str, problem: str) -> None:
    """P6: what the model wrote is kept, with what is wrong with it."""
    [call] = read_said(text, 0).calls
    assert call.problem.startswith(problem)


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_text_without_a_call_is_content(form: ToolFormat) -> None:
    """As it is."""
    assert read_said(" just words ", 0, form) == (" just words ", ())


def test_arguments_that_are_text_are_read() -> None:
    """Some models write them so; a whole text may be calls, where the format says it."""
    [call] = read_said('{"name": "add", "arguments": "{\\"a\\": 1}"}', 0, "json").calls
    assert (call.name, call.arguments) == ("add", '{"a":1}')


def test_a_call_that_is_nested_too_deeply_is_one_that_cannot_be_read() -> None:
    """P4: whatever a model writes, reading it raises nothing."""
    deep = '{"name": "f", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}"
    [call] = read_said(f"<tool_call>{deep}</tool_call>", 0).calls
    assert (call.name, call.arguments, call.problem) == ("", deep, "nested too deeply")
    assert read_said(deep, 0, "json") == Said(deep, ())
