"""Messages as token ids, and back: see `conversation.py` for why what is there is never encoded again.

Invariant: the event loop is never held: the tokenizer works in a thread, unless that costs more than its work.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_svc.chat_template import BAD_PROMPT, Functions, Messages
from rollout_svc.conversation import Growth
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.stop_texts import given_back
from rollout_svc.tokens import INLINE_TOKENS, TextCodec

__all__ = ["Words"]


class Words:
    """The tokenizer and its chat template, for an agent loop; every method raises SampleFailure `bad_prompt`."""

    __slots__ = ("_codec", "_growth")

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._growth = Growth()

    async def first(self, messages: Messages, tools: Functions | None = None) -> list[int]:
        """The ids that a conversation begins with, up to where the model speaks."""
        try:
            return await self._codec.work(lambda tokenizer: tokenizer.apply_chat_template(messages, tools))
        except ConfigError as error:
            raise SampleFailure(BAD_PROMPT, str(error)) from error

    async def added(
        self, before: Messages, new: Messages, last_id: int | None, tools: Functions | None = None
    ) -> list[int]:
        """The ids that new messages add after the model's own turn; see `conversation.Growth`."""
        small = self._growth.shown_chars(before, new, tools) <= INLINE_TOKENS
        try:
            return await self._codec.work(
                lambda tokenizer: self._growth.added_ids(tokenizer, before, new, last_id, tools), small=small
            )
        except ConfigError as error:
            raise SampleFailure(BAD_PROMPT, str(error)) from error

    async def text(self, ids: Sequence[int]) -> str:
        """What ids say, special tokens left out."""
        return await self._codec.work(lambda tokenizer: tokenizer.decode(ids), small=len(ids) <= INLINE_TOKENS)

    async def given_back(self, ids: Sequence[int], stops: Sequence[str], stands: int) -> int:
        """How many of the last ids are made again for the sake of stop texts; see `stop_texts`. Never raises."""
        if self._codec.tokenizer is not None and stops:
            try:
                return await self._codec.work(
                    lambda known: given_back(ids, stops, (known.decode, known.spell), stands),
                    small=len(ids) <= INLINE_TOKENS,
                )
            except Exception:  # noqa: BLE001, S110 - whatever its library raises: these ids are no text, then
                pass
        return given_back(ids, stops, (), stands)
