"""A conversation as token ids that only grow: what a new message adds is encoded, what is there is never encoded again.

Text that a model made does not always encode to the ids it made. So the ids of a conversation are those of its first
messages, then what the model made, id by id, then those of what was said to it since, and so on. What a message adds is
what the chat template writes after the model's own words: the end of its turn, and the messages up to where the next
turn begins.

Invariants:

- Pure, but for the tokenizer's own work.
- The ids before are a prefix of the ids after, always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_svc.chat_template import BAD_PROMPT, Functions, Messages
from rollout_svc.errors import SampleFailure
from rollout_svc.tokens import Tokenizer

__all__ = ["added_ids", "is_continuation"]

_WORDS: Final = "W0rdsThatNobodySays"
"""Stands for what the model said; a template may strip what is around it, not change it."""


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
    text = _end_of_turn(tokenizer, before, tools) + _grown(tokenizer, before, new, tools)
    ids = tokenizer.encode_rendered(text)
    return ids[1:] if ids and ids[0] == last_id else ids


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
