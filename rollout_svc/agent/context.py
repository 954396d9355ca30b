"""What an agent loop is given, what it must do, and the one helper for a turn.

An agent loop is any object with

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample

and may carry `on_pause` (`park` unless it says otherwise) and `one_turn` (false unless it says otherwise): where one
turn is all there is, an answer that came whole but late goes straight to the judge. A loop that is run again goes on in
its first turn from the tokens it has; one that had got further begins again from the prompt.

It calls `ctx.generate(ids)` once per turn, with the whole prefix as token ids, and returns the sample. Tokens are
recorded by `generate` itself, under the attempt this context was made for; those of its own it adds by `ctx.append`.
`ctx.words` turns messages into the ids that they add, `ctx.work` runs what is not the model's, and cleans up after it;
`ctx.sessions` makes turns for agents that speak an API of their own.

Invariants:

- A turn that `generate` returns is whole. A turn that was cut raises `Interrupted` (mode `abort`) or is continued
  after the gate opens (mode `park`); an agent that swallows the exception changes nothing: `ctx.cut` remembers, and
  from then on `generate` only raises.
- A context whose attempt was revoked starts no engine call.
- A continued turn sends prefix + tokens so far, with what is left of its budget; `max_tokens` counts the model's
  tokens of one turn over all its segments.
- A stop text that a cut divides is found all the same: what may be its beginning is made again; see `stop_texts`.
- Nothing is generated past a stop the engine reported, even where that answer came too late to count.
- Routed experts are asked for in every turn or in none: once a turn's sampling says `return_routed_experts: false`, the
  sample has none any more, and no later turn of this run of the loop asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.agent.prefix import Prefix
from rollout_svc.agent.turn import LOGPROBS_MODE, EngineCaller, OnPause, Turn
from rollout_svc.agent.words import Words
from rollout_svc.agent.work import Work
from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import Completion
from rollout_svc.errors import Interrupted, WorkerFailure
from rollout_svc.gate import Lane
from rollout_svc.prompt import Prompt
from rollout_svc.sample import ResumeAt, Sample
from rollout_svc.segment import FinishReason, Segment
from rollout_svc.signals import GateSignals
from rollout_svc.stop_texts import stops_of

if TYPE_CHECKING:
    from rollout_svc.sessions.registry import Sessions

__all__ = ["AgentContext"]

_CUT_S: Final = 0.05  # seconds before a turn that its engine cut is continued, doubling
_CUT_CAP_S: Final = 5.0


class AgentContext:
    """What one attempt of one sample may use; dead once the attempt is revoked."""

    __slots__ = (
        "_attempt",
        "_cuts",
        "_ends",
        "_engines",
        "_on_parked",
        "_prefix",
        "_sample",
        "_signals",
        "_stands",
        "calling",
        "cut",
        "experts",
        "lane",
        "on_pause",
        "one_turn",
        "prompt",
        "sampling",
        "sessions",
        "since",
        "turns",
        "words",
        "work",
    )

    def __init__(
        self,
        *,
        sample: Sample,
        attempt: int,
        prompt: Prompt,
        lane: Lane,
        sampling: SamplingConfig,
        on_pause: OnPause,
        one_turn: bool,
        engines: EngineCaller,
        signals: GateSignals,
        on_parked: Callable[[], None],
        words: Words,
        work: Work,
        sessions: Sessions | None = None,
        experts: bool = False,
    ) -> None:
        self.prompt = prompt
        self.lane: Lane = lane
        self.sampling = sampling
        self.on_pause: OnPause = on_pause
        self.one_turn = one_turn
        self.turns = 0
        self._cuts = 0
        self._stands = 0  # tokens of the turn under way that an engine was given: they are not given back again
        self._ends: list[tuple[FinishReason | None, str | None]] = []  # of each whole turn, ours and its engine's
        self.calling = False
        self.since = 0.0  # loop time of the end of the last engine call
        self.cut: ResumeAt | None = None
        self.experts = experts  # every turn so far asked for its routed experts
        self.words = words
        self.work = work
        self.sessions = sessions
        self._sample = sample
        self._attempt = attempt
        self._engines = engines
        self._signals = signals
        self._on_parked = on_parked
        self._prefix = Prefix()

    def append(self, ids: list[int]) -> None:
        """Add tokens that the model did not make: mask 0, logprob 0.0. They stand before the next turn.

        Raises:
            StaleAttempt: this context is over.
        """
        self._sample.extend(
            self._attempt, Segment(list(ids), [0.0] * len(ids), (), by_model=False, turn=self._sample.turn)
        )

    def begin_again(self, ids: list[int], reason: str) -> None:
        """Go on in another conversation, which begins with `ids`; what was said so far is a training segment by itself.

        Raises:
            StaleAttempt: this context is over.
        """
        if self._sample.response_length:  # what was said so far has rows that the new conversation lacks
            self.experts = False
        self._sample.begin_again(self._attempt, list(ids), reason)

    def drop_turn(self) -> None:
        """Forget a turn that is not whole and that nobody was told of, and what was appended for it.

        Raises:
            StaleAttempt: this context is over.
        """
        if self._sample.turn_length:
            self.experts = False  # the rows of what is dropped cannot be asked for again one by one
        self._sample.drop_turn(self._attempt)
        ended = self._ends[-1] if self._ends else (None, None)
        self._sample.finish_reason, self._sample.engine_finish_reason = ended

    def take_back(self) -> None:
        """Forget the last whole turn, of which nobody was told after all, and what was appended for it.

        Raises:
            StaleAttempt: this context is over.
        """
        self._sample.check(self._attempt)
        self._ends.pop()
        self._sample.turn -= 1
        self.turns -= 1
        self.drop_turn()

    def note(self, **meta: Any) -> None:
        """Write into the sample's `meta`; None takes a key out.

        Raises:
            StaleAttempt: this context is over.
        """
        self._sample.check(self._attempt)
        kept = {key: value for key, value in self._sample.meta.items() if key not in meta}
        self._sample.meta = kept | {key: value for key, value in meta.items() if value is not None}

    def length(self) -> int:
        """How many tokens there are: the prompt's, and all since."""
        return self._prefix.length(self._sample)

    @property
    def over(self) -> bool:
        """Whether another attempt has the sample, or none: nothing can be written under this one any more."""
        return self._sample.attempt != self._attempt

    async def may_speak(self, seconds: float) -> bool:
        """Wait until the lane is open, so long at most; returns whether it is."""
        if self._signals.is_open(self.lane):
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._signals.wait_open(self.lane)
        except TimeoutError:
            return False
        return True

    async def generate(self, ids: list[int] | None = None, sampling: SamplingConfig | None = None) -> Turn:
        """Generate one turn after the token ids `ids` (prompt and earlier turns; not this turn's own tokens).

        Args:
            ids: the whole prefix, token ids; None: the prompt, and all that was generated and appended since.
            sampling: settings for this turn; None uses the task's.

        Returns:
            The whole turn.

        Raises:
            Interrupted: the turn was cut by a pause and this loop does not park; its tokens are kept.
            SampleFailure: the engine's answer was invalid, or it refused the request.
            WorkerFailure: no worker could take it; the sample goes back and nothing is counted against it.
        """
        settings = sampling or self.sampling
        sample = self._sample
        if self.cut is not None:
            raise Interrupted(f"{sample.sample_id}: its turn was cut, this context is over")
        wanted = self.experts and settings.return_routed_experts
        if not wanted and (self.experts or sample.experts is not None):  # an earlier turn's, or those of another life
            self.experts = False
            sample.give_up_experts(self._attempt, "a turn asked for none")
        if sample.turn_length and sample.engine_finish_reason not in (None, "abort"):  # whole, but late: handed back
            return self._whole_turn("length" if sample.engine_finish_reason == "length" else "stop")
        while True:
            sample.check(self._attempt)
            if sample.turn_length < settings.max_tokens and (stops := stops_of(settings)):
                await self._give_back(stops)
            budget = settings.max_tokens - sample.turn_length
            if budget <= 0:
                return self._whole_turn("length")
            completion = await self._call(ids, budget, settings)
            if completion is None:
                await self._park()
                continue
            segment = Segment(completion.ids, completion.logprobs, completion.spans, turn=sample.turn)
            sample.extend(self._attempt, segment, completion.experts)
            known = sample.meta.setdefault(LOGPROBS_MODE, completion.logprobs_mode)
            if known != completion.logprobs_mode:
                sample.meta[LOGPROBS_MODE] = "mixed"
            sample.engine_finish_reason = completion.engine_finish_reason
            finish = _turn_end(completion, used_up=len(completion.ids) >= budget)
            if not completion.late and finish != "abort":
                return self._whole_turn(finish)
            sample.finish_reason = "abort"
            if self.on_pause == "abort":
                # A late whole answer is the whole sample only where one turn is all there is.
                whole = finish != "abort" and self.one_turn and not (self.experts and sample.rows_missing)
                self.cut = "judge" if whole else "generate"
                raise Interrupted(f"{sample.sample_id}: the turn was cut")
            await self._park()
            if finish != "abort":
                return self._whole_turn(finish)

    async def _give_back(self, stops: tuple[str, ...]) -> None:
        """Before a turn that was cut goes on: forget what may be the beginning of a text that ends it."""
        sample = self._sample
        own = sample.own_segments()
        if own:  # what came before the last call was given to it
            stands = max(self._stands, sample.turn_length - len(own[-1].ids))
            if count := await self.words.given_back(sample.turn_ids(), stops, stands):
                sample.give_back(self._attempt, count)
        self._stands = sample.turn_length

    async def _call(self, ids: list[int] | None, budget: int, settings: SamplingConfig) -> Completion | None:
        """Make one engine call; None when it was interrupted and this loop parks."""
        sample = self._sample
        self.calling = True
        try:
            # The prefix is put together for the call alone: nothing here holds it while the answer is waited for.
            return await self._engines.generate(
                sample,
                self.prompt,
                self.lane,
                self._prefix.of(sample) if ids is None else ids + sample.turn_ids(),
                budget,
                settings,
                experts=self.experts,
            )
        except Interrupted:
            if self.on_pause == "park":
                return None
            self.cut = "generate"
            raise
        except WorkerFailure:
            self.cut = "generate"
            raise
        finally:
            self.calling = False
            self.since = asyncio.get_running_loop().time()

    def _whole_turn(self, finish: FinishReason) -> Turn:
        sample = self._sample
        sample.check(self._attempt)
        own = sample.own_segments()
        sample.finish_reason = finish
        sample.turn += 1
        self.turns += 1
        self._ends.append((finish, sample.engine_finish_reason))
        self._cuts = 0
        return Turn(own, finish)

    async def _park(self) -> None:
        """Wait for the gate; an engine that cuts turns although it is open is asked again ever more slowly."""
        self._cuts += 1
        await self._signals.sleep_while_open(self.lane, min(_CUT_CAP_S, _CUT_S * 2 ** min(self._cuts, 16)))
        self._on_parked()
        await self._signals.wait_open(self.lane)


def _turn_end(completion: Completion, *, used_up: bool) -> FinishReason:
    """How the turn ended for us: an abort that had used the whole budget is a `length`."""
    if completion.finish_reason == "abort" and used_up:
        return "length"
    return completion.finish_reason
