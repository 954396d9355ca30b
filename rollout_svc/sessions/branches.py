"""What was said in a session, with its exact ids: which of it does a new request go on from?

A client sends its whole conversation with every request. Where that begins with one we know, word for word, the ids of
that part are those we have; what is new is encoded. Where the client has rewritten its history, dropped a part of it,
asks again or runs several conversations by turns, it goes on from the longest part it shares with any of them.

Invariants:

- Pure.
- A point is a place where the model spoke, or was about to: between points nothing is gone on from.
- Ids are never encoded twice: what a point has is what the model was given, or made.
- The arguments of a call are the same however a client's JSON spells them: the order of keys, 1 for 1.0.
- A turn costs what is new in it: a branch grows in place, and messages that are the same objects, as `resent.py` has
  them, compare at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

__all__ = ["Branches", "Match"]

Message = dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class Match:
    """From where a request goes on.

    Attributes:
        ids: of the part that is known; empty: nothing is. They grow when it is gone on from: not to be kept.
        known: how many of its messages that is.
        asking: the ids end where the model is to speak: nothing is to be added.
        current: it goes on from the end of what was said last.
        tools: that the request tells of.
        branch: whose end it is; None: it is none's.
    """

    ids: list[int]
    known: int
    asking: bool
    current: bool
    tools: Sequence[Message] = field(default=(), repr=False, compare=False)
    branch: _Branch | None = field(default=None, repr=False, compare=False)


class Branches:
    """The conversations of one session; the last one that was spoken in is the current one."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[_Branch] = []

    def __len__(self) -> int:
        return len(self._all)

    def match(self, messages: Sequence[Message], tools: Sequence[Message]) -> Match:
        """Find the longest known part that a conversation begins with; of equal ones, the one spoken in last."""
        told, place = list(tools), _Point(0, 0, asking=False)
        best: _Branch | None = None
        for branch in reversed(self._all):
            if branch.tools != told or branch.points[-1].messages <= place.messages:
                continue
            found = _last_point(branch, _shared(branch.messages, messages), len(messages))
            if found is not None and found.messages > place.messages:
                best, place = branch, found
        if best is None:
            return Match([], 0, asking=False, current=False, tools=told)
        if place is not best.points[-1]:
            return Match(best.ids[: place.ids], place.messages, place.asking, current=False, tools=told)
        return Match(best.ids, place.messages, place.asking, best is self._all[-1], told, best)

    def alike(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, bool]:
        """How many messages a conversation has as one that is known, and whether that was told of the same tools."""
        told = list(tools)
        return max((_shared(branch.messages, messages), branch.tools == told) for branch in self._all)

    def spoke(
        self, asked: Sequence[Message], added: Sequence[int], said: Message, made: list[int], found: Match
    ) -> None:
        """Take note of a turn.

        Args:
            asked: the conversation it answers.
            added: the ids of what is new in it.
            said: the model's words, as the client will send them back.
            made: its ids.
            found: what was known when it was asked, and nothing was noted since.
        """
        branch = found.branch
        if branch is None:
            branch = _Branch(asked, [*found.ids, *added], found.tools)
        else:  # longer by what is new; its messages are the client's own from now on, which compare at once
            self._all.remove(branch)
            branch.messages[:] = asked
            branch.ids += added
        self._all.append(branch)
        asking = _Point(len(asked), len(branch.ids), asking=True)
        branch.messages.append(said)
        branch.ids += made
        branch.points += [asking, _Point(len(asked) + 1, len(branch.ids), asking=False)]


def _last_point(branch: _Branch, shared: int, asked: int) -> _Point | None:
    """The last point of a branch within so many messages; where it ends with what is asked, the model is to speak."""
    for point in reversed(branch.points):
        if point.messages <= shared and (point.messages == asked) == point.asking:
            return point
    return None


def _shared(known: list[Message], given: Sequence[Message]) -> int:
    """How many messages two conversations begin with alike."""
    if len(known) <= len(given) and list(given[: len(known)]) == known:  # as nearly always, and compared at once
        return len(known)
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
