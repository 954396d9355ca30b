"""A conversation as token ids that only grow: what a new message adds is encoded, what is there is never encoded again.

Text that a model made does not always encode to the ids it made. So the ids of a conversation are those of its first
messages, then what the model made, id by id, then those of what was said to it since, and so on. What a message adds is
what the chat template writes after the model's own words: the end of its turn, and the messages up to where the next
turn begins.

Invariants:

- Pure, but for the tokenizer's own work, and what `Growth` remembers.
- The ids before are a prefix of the ids after, always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from rollout_svc.chat_template import BAD_PROMPT, Functions, Messages
from rollout_svc.errors import SampleFailure
from rollout_svc.tokens import Tokenizer

__all__ = ["Growth", "added_ids", "is_continuation"]

_WORDS: Final = "W0rdsThatNobodySays"
"""Stands for what the model said; a template may strip what is around it, not change it."""


_LOOK_AGAIN: Final = 4
"""A conversation that is so many times longer is shown to its template whole once more."""


class Growth:
    """What new messages add, at the same cost however long the conversation is.

    What most templates write for a message depends on its neighbours and on how the conversation began: then it is
    enough to show them the beginning, up to where the model first spoke, and the model's last words. That this comes to
    the same is tried on the conversation itself, whole, when it is first long enough and whenever it has become four
    times as long; where it once does not, it is shown whole every time.
    """

    __slots__ = ("_due", "_end", "_local", "_tools")

    def __init__(self) -> None:
        self._local = True
        self._due = 0  # messages with which it is tried again
        self._tools: Functions | None = None
        self._end: str | None = None  # of a turn of words alone, as it was written when that was tried last

    def __repr__(self) -> str:
        return f"<Growth {'by its end' if self._local else 'whole'}, tried again at {self._due} messages>"

    def shown_chars(self, before: Messages, new: Messages, tools: Functions | None = None) -> float:
        """How much text the template will be shown; infinite where that is the whole conversation, or tools as well."""
        ends = _ends(before)
        if tools or (len(ends) < len(before) and not self._by_ends(before, tools)):
            return inf
        return sum(len(str(message.get("content"))) for message in (*ends, *new))

    def _by_ends(self, before: Messages, tools: Functions | None) -> bool:
        return self._local and len(before) < self._due and tools == self._tools

    def added_ids(
        self, tokenizer: Tokenizer, before: Messages, new: Messages, last_id: int | None, tools: Functions | None = None
    ) -> list[int]:
        """As the function of this name."""
        return _after(last_id, tokenizer.encode_rendered(self._added(tokenizer, before, new, tools)))

    def _added(self, tokenizer: Tokenizer, before: Messages, new: Messages, tools: Functions | None) -> str:
        ends = _ends(before)
        if len(ends) == len(before) or not self._local:
            return _added(tokenizer, before, new, tools)
        if self._end is not None and self._by_ends(before, tools) and _plain(before[-1]):
            spoken = [*ends[:-1], {"role": "assistant", "content": _WORDS}, *new]
            text = _after_words(tokenizer.render(spoken, tools, asking=True))
            if text.startswith(self._end):
                return text
        try:
            by_ends = _added(tokenizer, ends, new, tools)
        except SampleFailure:  # what it misses, or the fault of `new`: the whole conversation tells
            by_ends = None
        if by_ends is not None and self._by_ends(before, tools):
            return by_ends
        text = _added(tokenizer, before, new, tools)
        self._local = text == by_ends
        self._due, self._tools, self._end = _LOOK_AGAIN * len(before), tools, None
        if self._local and _plain(before[-1]):
            self._end = _end_of_turn(tokenizer, ends, tools)
        return text


def _plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is words alone."""
    return message.keys() == {"role", "content"}


def _ends(messages: Messages) -> Messages:
    """The messages up to the assistant's first, and the last one, which is the assistant's too."""
    first = next((place for place, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    return [*messages[:first], messages[-1]]


def added_ids(
    tokenizer: Tokenizer, before: Messages, new: Messages, last_id: int | None, tools: Functions | None = None
) -> list[int]:
    """What `new` adds to a conversation whose last message is the model's own, up to where it speaks again.

    Args:
        tokenizer: with a chat template.
        before: the conversation until now; the last message is the assistant's, as it was parsed from the model's text.
        new: what is said to the model since, at least one message.
        last_id: the last id the model made; where it is the end of the turn, that is not written twice.
        tools: that the model was told of.

    Raises:
        SampleFailure: `bad_prompt`: the template refuses them, or does not write the conversation so that it grows.
        ConfigError: there is no template.
    """
    return _after(last_id, tokenizer.encode_rendered(_added(tokenizer, before, new, tools)))


def _after(last_id: int | None, ids: list[int]) -> list[int]:
    return ids[1:] if ids and ids[0] == last_id else ids


def _added(tokenizer: Tokenizer, before: Messages, new: Messages, tools: Functions | None) -> str:
    return _end_of_turn(tokenizer, before, tools) + _grown(tokenizer, before, new, tools)


def _end_of_turn(tokenizer: Tokenizer, before: Messages, tools: Functions | None) -> str:
    """What the template writes after an assistant's words where nothing follows."""
    spoken = [*before[:-1], {"role": "assistant", "content": _WORDS}]
    return _after_words(tokenizer.render(spoken, tools, asking=False))


def _grown(tokenizer: Tokenizer, before: Messages, new: Messages, tools: Functions | None) -> str:
    """What the template writes for new messages, after the end of the assistant's turn."""
    shorter = tokenizer.render(before, tools, asking=False)
    longer = tokenizer.render([*before, *new], tools, asking=True)
    if longer.startswith(shorter):
        return longer[len(shorter) :]
    # A template may write an assistant's message otherwise once others follow it, as without what it thought.
    plain = [*before[:-1], _in_other_words(before[-1])]
    shorter = _after_words(tokenizer.render(plain, tools, asking=False))
    longer = _after_words(tokenizer.render([*plain, *new], tools, asking=True))
    if longer.startswith(shorter):
        return longer[len(shorter) :]
    raise SampleFailure(BAD_PROMPT, "messages: the chat template writes what was said otherwise when more is said")


def _in_other_words(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": _WORDS}


def _after_words(text: str) -> str:
    _, found, rest = text.rpartition(_WORDS)
    if not found:
        raise SampleFailure(BAD_PROMPT, "messages: the chat template does not write what an assistant says")
    return rest


def is_continuation(known: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation begins with all messages of another, unchanged."""
    return len(given) > len(known) and all(one == other for one, other in zip(known, given, strict=False))
