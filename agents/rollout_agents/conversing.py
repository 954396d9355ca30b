"""A conversation of several turns: what is said to the model, what it says, and why it ended.

Invariants:

- Ids only grow: what is said to the model is appended, and nothing is encoded again.
- Nothing is appended unless a turn follows: tokens after the last turn would teach nothing, and have no routed experts.
- `ended` says why, once it has: `length`, `max_turns`, `context_full`, or what its loop says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_svc.agent import AgentContext
from rollout_svc.chat_template import Functions
from rollout_svc.errors import SampleFailure
from rollout_svc.overflow import is_overflow
from rollout_svc.sample import Sample
from rollout_svc.tool_calls import Said, ToolFormat, read_said

__all__ = ["Conversation"]


class Conversation:
    """One sample's conversation, under one attempt.

    Attributes:
        messages: all that was said.
        turns: of the model.
        ended: why it is over; None: it is not.
    """

    def __init__(
        self,
        sample: Sample,
        ctx: AgentContext,
        *,
        max_turns: int,
        form: ToolFormat | None = None,
        functions: Functions | None = None,
    ) -> None:
        """Prepare a conversation.

        Args:
            sample: whose tokens it is made of.
            ctx: of the attempt.
            max_turns: of the model, at most.
            form: how the model writes calls; None: its text is content, all of it.
            functions: that it may call.
        """
        self.messages: list[Any] = []
        self.turns = 0
        self.ended: str | None = None
        self._sample = sample
        self._ctx = ctx
        self._max_turns = max_turns
        self._form: ToolFormat | None = form
        self._functions = functions
        self._last_id: int | None = None

    async def begin(self, messages: Sequence[Any] | None = None) -> None:
        """Begin.

        Args:
            messages: what the conversation begins with; None: the prompt's own. Where the prompt is text or ids, these
                stand as they are, and have to tell of functions themselves.
        """
        own = self._ctx.prompt.content
        as_messages = messages if messages is not None else own if isinstance(own, list) else None
        ids = self._ctx.prompt.input_ids  # those of its messages, where it has some
        if as_messages is None:
            self.messages = [{"role": "user", "content": own if isinstance(own, str) else ""}]
        else:
            self.messages = list(as_messages)
            if messages is not None or self._functions:
                ids = await self._ctx.words.first(self.messages, self._functions)
        if ids != self._sample.prompt_ids:
            self._ctx.drop_turn()  # what another run of the loop made after another beginning
            self._ctx.begin_again(ids, "another_beginning")

    async def turn(self) -> Said | None:
        """Have the model speak; None: its context is full, and the conversation ended with the turn before."""
        try:
            turn = await self._ctx.generate()
        except SampleFailure as failure:
            if not self.turns or self._sample.turn_length or not is_overflow(failure):
                raise
            self._ctx.drop_turn()
            self.ended = "context_full"
            return None
        ids = turn.ids
        text = await self._ctx.words.text(ids)
        said = Said(text, ()) if self._form is None else read_said(text, self.turns, self._form)
        self.turns += 1
        self.messages.append(said.as_message())
        self._last_id = ids[-1] if ids else None
        if turn.finish_reason == "length":
            self.ended = "length"
        elif self.turns >= self._max_turns:
            self.ended = "max_turns"
        return said

    async def tell(self, new: Sequence[Any]) -> None:
        """Say something to the model, which speaks next."""
        ids = await self._ctx.words.added(self.messages, new, self._last_id, self._functions)
        self._ctx.append(ids)
        self.messages += new
