"""What was said in a session, with its exact ids: which of it does a new request go on from?

A client sends its whole conversation with every request. Where that begins with one we know, word for word, the ids of
that part are those we have; what is new is encoded. Where the client has rewritten its history, dropped a part of it,
asks again or runs several conversations by turns, it goes on from the longest part it shares with any of them.

Invariants:

- Pure.
- A point is a place where the model spoke, or was about to: between points nothing is gone on from.
- Ids are never encoded twice: what a point has is what the model was given, or made.
- The arguments of a call are the same however a client's JSON spells them: the order of keys, 1 for 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

__all__ = ["Branches", "Match"]

Message = dict[str, Any]


class Match(NamedTuple):
    """From where a request goes on.

    Attributes:
        ids: of the part that is known; empty: nothing is.
        known: how many of its messages that is.
        asking: the ids end where the model is to speak: nothing is to be added.
        current: it goes on from the end of what was said last.
    """

    ids: list[int]
    known: int
    asking: bool
    current: bool


class _Point(NamedTuple):
    messages: int
    ids: int
    asking: bool


class _Branch:
    """One conversation as far as it came; `tools` were told to the model at its beginning."""

    __slots__ = ("ids", "messages", "points", "tools")

    def __init__(self, messages: Sequence[Message], ids: list[int], tools: Sequence[Message]) -> None:
        self.messages = list(messages)
        self.ids = ids
        self.tools = list(tools)
        self.points: list[_Point] = []


class Branches:
    """The conversations of one session; the last one that was spoken in is the current one."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[_Branch] = []

    def __len__(self) -> int:
        return len(self._all)

    def match(self, messages: Sequence[Message], tools: Sequence[Message]) -> Match:
        """Find the longest known part that a conversation begins with; of equal ones, the one spoken in last."""
        best = Match([], 0, asking=False, current=False)
        for branch in reversed(self._all):
            shared = _shared(branch.messages, messages) if branch.tools == list(tools) else 0
            for point in branch.points:
                whole = point.messages == len(messages)
                if point.messages > shared or whole != point.asking or point.messages <= best.known:
                    continue
                current = branch is self._all[-1] and point is branch.points[-1]
                best = Match(branch.ids[: point.ids], point.messages, point.asking, current)
        return best

    def spoke(
        self, asked: Sequence[Message], prefix: list[int], said: Message, made: list[int], tools: Sequence[Message]
    ) -> None:
        """Take note of a turn.

        Args:
            asked: the conversation it answers.
            prefix: the ids the model was given.
            said: its words, as the client will send them back.
            made: its ids.
            tools: that it was told of.
        """
        last = self._all[-1] if self._all else None
        if last is not None and last.tools == list(tools) and prefix[: len(last.ids)] == last.ids:
            shared = _shared(last.messages, asked) == len(last.messages)
        else:
            shared = False
        if last is None or not shared:
            last = _Branch(asked, prefix, tools)
            self._all.append(last)
        last.messages = [*asked, said]
        last.ids = prefix + made
        last.points += [
            _Point(len(asked), len(prefix), asking=True),
            _Point(len(asked) + 1, len(last.ids), asking=False),
        ]


def _shared(known: Sequence[Message], given: Sequence[Message]) -> int:
    """How many messages two conversations begin with alike."""
    for place, (one, other) in enumerate(zip(known, given, strict=False)):
        if not _same(one, other):
            return place
    return min(len(known), len(given))


def _same(one: Message, other: Message) -> bool:
    """Whether two messages say the same; a client may have read a call's arguments, and written them again."""
    if one == other:
        return True
    if not one.get("tool_calls") or not other.get("tool_calls"):
        return False
    return _spelled_alike(one) == _spelled_alike(other)


def _spelled_alike(message: Message) -> Message:
    calls = [call | {"function": _function(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _function(function: Message) -> Message:
    try:
        told = orjson.dumps(_plain(orjson.loads(function["arguments"])), option=orjson.OPT_SORT_KEYS)
    except (ValueError, TypeError):  # no JSON; nested deeper than it can be written
        return function
    return function | {"arguments": told}


def _plain(value: Any) -> Any:
    """Numbers as a language with one kind of them has them."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
