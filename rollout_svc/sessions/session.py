"""One session: turns that a client asks for, made of one sample's attempt.

Invariants:

- The token ids are ours: a turn's prompt is the exact ids of the turns before it, and those of the new messages. Where
  the client has rewritten its history, another training segment begins, and the sample says why.
- One turn at a time; what a client is told is what is trained on, and nothing that it was not told is.
- A turn that a pause cuts goes on after it before the client is answered; one that the client does not wait for is
  forgotten. A new one waits for the gate, for so long, and is then refused.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.agent.context import AgentContext
from rollout_svc.config import SamplingConfig
from rollout_svc.errors import Gone, NotNow, RolloutError, SampleFailure
from rollout_svc.gate import Lane
from rollout_svc.judging import REPORTED
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.sessions.branches import Branches, Match
from rollout_svc.sessions.exchange import Answer, Asked, End
from rollout_svc.sessions.resent import Reader, Resent
from rollout_svc.tool_calls import Said, ToolFormat, read_said

__all__ = ["Session"]

_RETRY_S: Final = 1.0


class Session:
    """A conversation of an agent that speaks an API; see the module's invariants.

    Attributes:
        session_id: in its address.
        key: that its requests carry.
        sample: whose tokens it makes.
        turns: that were answered.
        reward: that was reported for it; None: none yet.
        ended: done when it is over: no more turns.
        failure: why it is over, where that was no good end.
        elsewhere: its agent lives elsewhere.
        offered: it waits for such a one.
        last_used: loop time.
        speaking: the task of the turn that the engine works on: those still to come may yet be refused.
        quiet_s: seconds, pauses left out, since anybody asked for anything.
        taken_s: seconds, pauses left out, since its agent began.
    """

    def __init__(
        self,
        session_id: str,
        key: str,
        sample: Sample,
        context: AgentContext,
        *,
        form: ToolFormat,
        hold_s: float,
        timeout_s: float | None = None,
        max_turns: int | None = None,
    ) -> None:
        """Begin a session.

        Args:
            session_id: in its address.
            key: that its requests carry.
            sample: whose tokens it makes.
            context: of the attempt.
            form: how the model writes calls of tools.
            hold_s: seconds for which a turn waits for a pause to end.
            timeout_s: seconds its agent may take, pauses left out; None: the caller sees to it.
            max_turns: that it may have; asking for more ends it; None: as many as it likes.
        """
        self.session_id = session_id
        self.key = key
        self.sample = sample
        self.turns = 0
        self.reward: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: RolloutError | None = None
        self.elsewhere = False
        self.offered = False
        self.last_used = asyncio.get_running_loop().time()
        self.speaking: asyncio.Task[object] | None = None
        self.quiet_s = 0.0
        self.taken_s = 0.0
        self.timeout_s = timeout_s
        self.max_turns = max_turns
        self._context = context
        self._form: ToolFormat = form
        self._hold_s = hold_s
        self._settings = context.sampling  # of the last turn
        self._branches = Branches()
        self._resent = Resent()
        self._speaking = asyncio.Lock()

    def __repr__(self) -> str:
        where = f"{self.session_id} of {self.sample.sample_id}"
        return f"<Session {where}: {self.turns} turns, {len(self._branches)} branches>"

    @property
    def over(self) -> bool:
        """Whether no turn can be made any more: it ended, or its sample was taken from it."""
        return self.ended.done() or self._context.over

    @property
    def prompt(self) -> Prompt:
        """What its agent is to answer."""
        return self._context.prompt

    @property
    def lane(self) -> Lane:
        """The lane of its sample."""
        return self._context.lane

    def end(self, failure: RolloutError | None = None) -> None:
        """Make no more turns; the first to end it says why."""
        if not self.ended.done():
            self.failure = failure
            self.ended.set_result(None)

    def _used(self) -> None:
        self.last_used = asyncio.get_running_loop().time()
        self.quiet_s = 0.0

    def read(self, raw: bytes, reader: Reader) -> Asked:
        """Read the body of a request for a turn; what it repeats of the last one is not read again.

        Raises:
            ValueError: it is not JSON.
            BadRequest: with the path of the field that is wrong, or that cannot be honoured.
        """
        return self._resent.read(raw, reader)

    async def turn(self, asked: Asked) -> Answer:
        """Make one turn; whoever is cancelled here leaves no token behind.

        Raises:
            NotNow: `paused`: the gate did not open in time; ask again.
            Gone: it has had all its turns, and is over.
            SampleFailure: the messages cannot become tokens, or the engine refused them.
            StaleAttempt: the sample was taken back meanwhile: this session is over.
        """
        self._used()
        until = asyncio.get_running_loop().time() + self._hold_s
        await self._wait_to_speak(until)  # each turn for itself: one behind another waits no longer
        async with self._speaking:
            await self._wait_to_speak(until)
            self.check_turns()
            found, added = await self._prepare(asked)
            prompt_tokens = len(found.ids) + len(added)
            self.speaking = asyncio.current_task()
            try:
                turn = await self._context.generate(None, self._sampling(asked))
            except BaseException:
                if not self._context.over:
                    self._context.drop_turn()
                raise
            finally:
                self.speaking = None
            made = turn.ids
            try:
                text, stopped_by = _up_to_stop(await self._context.words.text(made), asked.stop)
                said = self._read(text, asked)
            except BaseException:
                if not self._context.over:
                    self._context.take_back()
                raise
            self._branches.spoke(asked.messages, added, said.as_message(), made, found)
            self.turns += 1
            self._used()
            end: End = "tool_calls" if said.calls else "length" if turn.finish_reason == "length" else "stop"
            answer_id = f"{self.session_id}-{self.turns}"
            return Answer(answer_id, said, end, prompt_tokens, len(made), stopped_by if end == "stop" else None)

    def _read(self, text: str, asked: Asked) -> Said:
        """Read a turn as servers do: calls are for whoever gave tools, and one without a name is what it is, text."""
        said = read_said(text, self.turns, self._form) if asked.tools else Said(text, ())
        return said if all(call.name for call in said.calls) else Said(text, ())

    def check_turns(self) -> None:
        """End it where it has had all its turns; raises Gone."""
        if self.max_turns is not None and self.turns >= self.max_turns:
            self.end()
            raise Gone(f"this session is over: it had its {self.max_turns} turns")

    async def _wait_to_speak(self, until: float) -> None:
        if not await self._context.may_speak(max(0.0, until - asyncio.get_running_loop().time())):
            raise NotNow("paused", "the stage is paused", retry_after_s=_RETRY_S)

    async def _prepare(self, asked: Asked) -> tuple[Match, list[int]]:
        """Have the sample end where the model is to speak; what was known of it, and the ids that were added."""
        found = self._branches.match(asked.messages, asked.tools)
        added = await self._added(asked, found)
        # Where another conversation was begun, and its first turn dropped, the sample is not what was said last.
        dropped = self._context.length() != len(found.ids)
        if found.current and not dropped:
            self._context.append(added)
        elif (prefix := found.ids + added) != self.sample.prefix_ids():
            self._context.begin_again(prefix, self._reason(found, asked))
        return found, added

    async def _added(self, asked: Asked, found: Match) -> list[int]:
        words, tools = self._context.words, asked.tools or None
        if not found.known:
            return await words.first(asked.messages, tools)
        if found.asking:
            return []
        before, new = asked.messages[: found.known], asked.messages[found.known :]
        return await words.added(before, new, found.ids[-1], tools)

    def _reason(self, found: Match, asked: Asked) -> str:
        if not len(self._branches):
            return "first"
        if found.asking:
            return "asked_again"
        alike, same_tools = self._branches.alike(asked.messages, asked.tools)
        if all(message["role"] == "system" for message in asked.messages[:alike]):
            return "another_conversation"
        return f"history_rewritten: message {alike} of {len(asked.messages)}" if same_tools else "tools_changed"

    def _sampling(self, asked: Asked) -> SamplingConfig:
        """The task's settings are what is trained with; a client may ask for fewer tokens, and for more stops."""
        own, last = self._context.sampling, self._settings
        most = min(own.max_tokens, asked.max_tokens or own.max_tokens)
        stop = tuple(dict.fromkeys((*own.stop, *asked.stop))) if asked.stop else own.stop
        if (most, stop) != (last.max_tokens, last.stop):  # as clients ask nearly always: the same again
            self._settings = last = own.model_copy(update={"max_tokens": most, "stop": stop})
        return last

    def report(self, reward: float) -> None:
        """Note the reward that its agent, or whoever watches it, gives.

        Raises:
            SampleFailure: it is over.
        """
        if self.over:
            raise SampleFailure("session_over", f"{self.session_id} is over")
        self._used()
        self.reward = reward
        self.sample.meta = {**self.sample.meta, REPORTED: reward}


def _up_to_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Leave out the text that a client asked to stop at, as both APIs do; its ids stay those of the turn."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    place, stop = min(found, default=(len(text), None))
    return text[:place], stop
