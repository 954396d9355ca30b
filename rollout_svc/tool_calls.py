"""Calls of tools in what a model wrote, and what it said besides.

| format | a call is |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes models write it |
| `json` | the whole text, one such object or a list of them |

Invariants:

- Pure. Text that is no call is content; a call that is none is told as one that cannot be read, never dropped.
- A call's id is made of the turn and its place in it: the same turn has the same ids whenever it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

import orjson

__all__ = ["FORMATS", "Said", "ToolCall", "ToolFormat", "read_said"]

ToolFormat = Literal["hermes", "json"]
FORMATS: Final[tuple[ToolFormat, ...]] = get_args(ToolFormat)
_HERMES: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


class ToolCall(NamedTuple):
    """One call.

    Attributes:
        call_id: of this call, unique in its conversation.
        name: of the tool; empty where it could not be read.
        arguments: JSON text of an object; what the model wrote, where it could not be read.
        problem: why it could not; empty: it could.
    """

    call_id: str
    name: str
    arguments: str
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """As a message of OpenAI's API has it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Said(NamedTuple):
    """What a turn of the model comes to.

    Attributes:
        content: its text, without its calls.
        calls: in order.
    """

    content: str
    calls: tuple[ToolCall, ...]

    def as_message(self) -> dict[str, Any]:
        """As an assistant's message in a conversation, OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": [call.as_json() for call in self.calls]} if self.calls else {})


def read_said(text: str, turn: int, form: ToolFormat = "hermes") -> Said:
    """Read a turn.

    Args:
        text: all of it, special tokens left out.
        turn: its number in the conversation, from 0.
        form: how the model writes calls.
    """
    if form == "json":
        try:
            calls = [_call(item, turn, place) for place, item in enumerate(_objects(text))]
        except TypeError:  # nested deeper than it can be written
            calls = []
        return Said("", tuple(calls)) if calls and not any(call.problem for call in calls) else Said(text, ())
    found = _HERMES.findall(text)
    calls = [_read(body, turn, place) for place, body in enumerate(found)]
    return Said(_HERMES.sub("", text).strip() if calls else text, tuple(calls))


def _read(body: str, turn: int, place: int) -> ToolCall:
    try:
        return _call(orjson.loads(body), turn, place)
    except TypeError:
        return ToolCall(_id(turn, place), "", body, "nested too deeply")
    except ValueError as error:
        return ToolCall(_id(turn, place), "", body, f"no JSON: {error}")


def _call(item: Any, turn: int, place: int) -> ToolCall:
    name = item.get("name") if isinstance(item, dict) else None
    arguments = item.get("arguments", item.get("parameters", {})) if isinstance(item, dict) else None
    if isinstance(arguments, str):  # some models write them as text of their own
        try:
            arguments = orjson.loads(arguments)
        except ValueError as error:
            return ToolCall(_id(turn, place), str(name or ""), arguments, f"arguments: no JSON: {error}")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        written = orjson.dumps(item).decode()
        return ToolCall(
            _id(turn, place), "", written, "expected an object with a name, and arguments that are an object"
        )
    return ToolCall(_id(turn, place), name, orjson.dumps(arguments).decode())


def _objects(text: str) -> Iterator[Any]:
    try:
        found = orjson.loads(text)
    except ValueError:
        return
    yield from found if isinstance(found, list) else [found]


def _id(turn: int, place: int) -> str:
    return f"call_{turn}_{place}"
