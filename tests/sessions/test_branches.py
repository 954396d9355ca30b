"""From where a request goes on: exact ids of the longest part that is known."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.sessions.branches import Branches, Match

USER: dict[str, Any] = {"role": "user", "content": "a"}
OTHER: dict[str, Any] = {"role": "user", "content": "b"}
SAID: dict[str, Any] = {"role": "assistant", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def spoken() -> Branches:
    """One turn: [1, 2] was given, [3, 4] was made."""
    branches = Branches()
    speak(branches, [USER], [1, 2], SAID, [3, 4])
    return branches


def speak(branches: Branches, asked: list[Any], added: list[int], said: dict[str, Any], made: list[int]) -> None:
    """A turn, from what is known of what is asked."""
    branches.spoke(asked, added, said, made, branches.match(asked, []))


def test_nothing_is_known_at_first() -> None:
    """No ids, no messages."""
    assert Branches().match([USER], []) == Match([], 0, asking=False, current=False)


def test_a_conversation_that_goes_on() -> None:
    """P6: the exact ids that were given and made; the new message alone is to be encoded."""
    assert spoken().match([USER, SAID, OTHER], []) == Match([1, 2, 3, 4], 2, asking=False, current=True)


def test_the_same_request_again() -> None:
    """It is given the same ids, and nothing is added: what was made before is another branch."""
    branches = spoken()
    assert branches.match([USER], []) == Match([1, 2], 1, asking=True, current=False)
    speak(branches, [USER], [], {**SAID, "content": "y"}, [5])
    assert len(branches) == 2
    assert branches.match([USER, SAID, OTHER], []) == Match([1, 2, 3, 4], 2, asking=False, current=False)


def test_what_was_rewritten_is_not_gone_on_from() -> None:
    """Other words in the model's mouth, or other tools: nothing is known."""
    nothing = Match([], 0, asking=False, current=False)
    assert spoken().match([USER, {**SAID, "content": "z"}, OTHER], []) == nothing
    assert spoken().match([USER, SAID, OTHER], TOOLS) == nothing


@pytest.mark.parametrize(
    ("spelled", "same"),
    [
        ('{"b": 2, "a": 1}', True),
        ('{"a":1.0,"b":2}', True),
        ('{"a":true,"b":2}', False),
        ('{"a":1,"b":3}', False),
        ('{"a":"1","b":2}', False),
        ('{"a":1,"b":2', False),
    ],
)
def test_arguments_are_the_same_however_they_are_spelled(spelled: str, same: bool) -> None:
    """P6: JSON that a client read and wrote again is no rewriting of history; other values are."""
    branches = Branches()
    speak(branches, [USER], [1, 2], called('{"a":1,"b":2.0}'), [3, 4])
    assert bool(branches.match([USER, called(spelled), OTHER], []).known) is same


def called(arguments: str) -> dict[str, Any]:
    """A message that calls a tool."""
    return {**SAID, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


def test_two_conversations_by_turns() -> None:
    """P6: each goes on from its own ids; the one spoken in last is the current one."""
    branches = spoken()
    speak(branches, [OTHER], [9], SAID, [8])
    assert branches.match([OTHER, SAID, USER], []) == Match([9, 8], 2, asking=False, current=True)
    first = branches.match([USER, SAID, OTHER], [])
    assert first == Match([1, 2, 3, 4], 2, asking=False, current=False)
    branches.spoke([USER, SAID, OTHER], [5], SAID, [6], first)
    assert len(branches) == 2
    assert branches.match([USER, SAID, OTHER, SAID, USER], []) == Match([1, 2, 3, 4, 5, 6], 4, False, current=True)
    assert branches.match([OTHER, SAID, USER], []) == Match([9, 8], 2, asking=False, current=False)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=12))
def test_ids_are_those_that_were_there(history: list[tuple[int, int]]) -> None:
    """P6: whatever is asked, what is found was given and made for exactly these messages."""
    branches, known = Branches(), defaultdict[str, list[list[int]]](list)
    for serial, (who, drop) in enumerate(history, 1):
        longest = max(known, key=len, default="")
        messages = [*map(_message, longest), _message("abc"[who])]
        messages = messages[: max(1, len(messages) - drop)]
        found = branches.match(messages, [])
        text = "".join(_letter(message) for message in messages)
        if found.known:
            assert found.ids in known[text[: found.known]]
        added = [] if found.asking else [serial * 10]
        prefix = [*found.ids, *added]
        said = {"role": "assistant", "content": str(serial)}
        branches.spoke(messages, added, said, [serial * 10 + 1], found)
        known[text].append(prefix)
        known[text + chr(0x100 + serial)].append([*prefix, serial * 10 + 1])


def _message(letter: str) -> dict[str, Any]:
    if letter in "abc":
        return {"role": "user", "content": letter}
    return {"role": "assistant", "content": str(ord(letter) - 0x100)}


def _letter(message: dict[str, Any]) -> str:
    return message["content"] if message["role"] == "user" else chr(0x100 + int(message["content"]))


class Watched(dict[str, Any]):  # noqa: PLW1641 - dicts have no hash
    """A message that counts how often it is compared word for word."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return super().__eq__(other)


def test_a_message_is_compared_once() -> None:
    """What a client sends for the model's own words takes their place: the same objects again compare at once."""
    branches, told = spoken(), [Watched(USER), Watched(SAID), Watched(OTHER)]
    speak(branches, told, [5], SAID, [6])
    before = [message.compared for message in told]
    assert branches.match([*told, SAID, OTHER], []) == Match([1, 2, 3, 4, 5, 6], 4, asking=False, current=True)
    assert [message.compared for message in told] == before
