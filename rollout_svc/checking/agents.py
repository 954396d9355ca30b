"""What is tried with an agent loop: a plain run, then everything that may happen to it, at each of its awaits.

Invariants:

- One object for all runs, in one event loop, as in the service.
- A run that fails by itself ends the check: what would follow from that is not told as well.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, get_args

from rollout_svc.agent import OnPause
from rollout_svc.checking import places
from rollout_svc.checking.findings import Report
from rollout_svc.checking.speaker import Cut
from rollout_svc.checking.stand import LANE, Manners, Stand
from rollout_svc.checking.stepping import Runaway
from rollout_svc.checking.trying import ENDS_S, Act, Tried, points, tell, try_it
from rollout_svc.errors import SampleFailure, StaleAttempt, WorkerFailure
from rollout_svc.judging import ProcessRunner
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample

__all__ = ["RULES", "AgentCheck"]

RULES: Final = MappingProxyType(
    {
        "attributes": "async def run(self, sample, ctx); on_pause, if there is one, is 'abort' or 'park', and one_turn "
        "True or False",
        "raises": "it returns, or raises SampleFailure(reason, message)",
        "ends": "it ends, and waits for nothing that never comes",
        "returns": "it returns the sample it was given",
        "turns": "it calls ctx.generate at least once, and only once where one_turn is True",
        "ids": "ctx.generate is given None, or the very ids that were generated and appended, one call at a time",
        "last_turn": "the last word is the model's: nothing is appended after the last turn",
        "shared": "what belongs to a sample is kept in run(), not on the object, which serves many at once",
        "cancellation": "asyncio.CancelledError goes through, after a short clean-up at most",
        "passes_on": "what ctx.generate and ctx.append raise goes through: Interrupted, StaleAttempt, WorkerFailure, "
        "SampleFailure",
        "pauses": "a pause of any length is no failure: no time-out of its own runs around ctx.generate",
        "left_running": "no task, thread or process outlives the run: see ctx.work.on_end and ctx.work.call",
        "clean_up": "what was given to ctx.work.on_end ends in time, and raises nothing",
        "holds_loop": "nothing blocks the event loop: what computes or waits without await goes into ctx.work.call",
    }
)

_LIMIT_S: Final = 3600.0  # of one run, on a clock that passes at once
_LONG_S: Final = 1000.0  # of a pause, and of a slow turn
_CUTS: Final[tuple[Cut, ...]] = get_args(Cut)
_CUT_WORDS: Final = {
    "partial": "a pause cut its turn in half",
    "silent": "a pause left its turn unanswered",
    "late": "its turn came whole, after a pause had begun",
}
_ODD_TURNS: Final = {"an empty turn": "", "a turn of nonsense": "\x00}{<tool_call>{]", "a turn of blanks": " \n "}


class AgentCheck:
    """Tries an agent loop, and puts what it finds into a report."""

    def __init__(
        self,
        agent: Any,
        report: Report,
        prompt: Prompt,
        texts: Sequence[str],
        processes: ProcessRunner | None,
    ) -> None:
        self._agent = agent
        self._report = report
        self._prompt = prompt
        self._texts = tuple(texts)
        self._processes = processes
        self._on_pause: OnPause = "park"
        self._one_turn = False
        self._number = 0

    def look(self) -> bool:
        """Look at it without running it; returns whether it can be run."""
        agent, report, done = self._agent, self._report, "looked at it"
        run = getattr(agent, "run", None)
        where = places.of_thing(agent if inspect.isfunction(agent) else type(agent))
        if not callable(run):
            report.add("attributes", done, "it has no method run(sample, ctx)", where)
            return False
        if not inspect.iscoroutinefunction(run):
            report.add("attributes", done, "its run is not async", places.of_thing(run))
            return False
        try:
            inspect.signature(run).bind(None, None)
        except TypeError as error:
            report.add("attributes", done, f"its run does not take (sample, ctx): {error}", places.of_thing(run))
            return False
        on_pause: Any = getattr(agent, "on_pause", "park")
        one_turn: Any = getattr(agent, "one_turn", False)
        if on_pause not in get_args(OnPause):
            report.add("attributes", done, f"its on_pause is {on_pause!r}", where)
            return False
        if not isinstance(one_turn, bool):
            report.add("attributes", done, f"its one_turn is {one_turn!r}", where)
            return False
        self._on_pause, self._one_turn = on_pause, one_turn
        return True

    async def run(self) -> None:
        """Try everything."""
        plain = await self._plain("ran it", self._manners())
        if plain is None:
            return
        await self._two_at_once()
        for what, text in _ODD_TURNS.items():
            await self._odd(f"ran it with {what}", text)
        for at in points(plain.waits):
            await self._cancelled(at)
            for cut in _CUTS:
                await self._paused(at, cut)
            await self._taken_back(at)
        for call in range(1, 4):
            await self._failing(call, WorkerFailure("connection", "the worker is gone"))
            await self._failing(call, SampleFailure("invalid_response", "the engine refused it"))
        await self._slow()

    # -- runs ------------------------------------------------------------------------------------------------

    def _manners(self, **other: Any) -> Manners:
        return Manners(**{"texts": self._texts, "on_pause": self._on_pause, "one_turn": self._one_turn} | other)

    def _stand(self, manners: Manners) -> Stand:
        self._number += 1
        return Stand(self._prompt, manners, self._processes, self._number)

    async def _try(
        self,
        done: str,
        stand: Stand,
        *,
        at: int | None = None,
        act: Act | None = None,
        limit_s: float = _LIMIT_S,
    ) -> Tried:
        """Run it once, and tell what is wrong whatever was done to it."""
        self._report.tries += 1
        run = self._agent.run(stand.sample, stand.context)
        tried = await try_it(run, limit_s=limit_s, at=at, act=act, after=stand.context.work.close)
        for rule, happened, where in stand.wrong:
            self._report.add(rule, done, happened, where)
        for left in tried.left:
            self._report.add("left_running", done, left.what, left.where or places.of_thing(self._agent.run))
        for failed in stand.context.work.failed:
            happened, where = places.split(failed)
            where = where or places.of_thing(self._agent.run)
            self._report.add("clean_up", done, f"a clean-up failed: {happened}", where)
        return tried

    async def _plain(self, done: str, manners: Manners) -> Tried | None:
        """A run to which nothing happens; None where it fails."""
        stand = self._stand(manners)
        tried, report = await self._try(done, stand), self._report
        if tried.outcome == "running":
            if not report.broken("ends"):
                report.add("ends", done, "it had not ended after an hour", tried.where)
        elif isinstance(tried.error, Runaway):
            pass  # told where it was ended
        elif tried.outcome == "cancelled":
            report.add("raises", done, "it cancelled itself", places.of_thing(self._agent.run))
        elif tried.error is not None:
            report.add("raises", done, tried.told, tried.where)
        else:
            self._look_at_sample(done, stand, tried.value)
        return None if tried.outcome != "returned" or report.findings else tried

    def _look_at_sample(self, done: str, stand: Stand, value: Any) -> None:
        report, sample, where = self._report, stand.sample, places.of_thing(self._agent.run)
        if not isinstance(value, Sample) or value is not sample:
            told = type(value).__name__ if not isinstance(value, Sample) else "another sample"
            report.add("returns", done, f"it returned {told}", where)
        turns = stand.context.turns
        if turns == 0:
            report.add("turns", done, "it returned without a turn", where)
        elif turns > 1 and self._one_turn:
            report.add("turns", done, f"one_turn is True, and it made {turns} turns", where)
        elif sample.segments and not sample.segments[-1].by_model:
            count = len(sample.segments[-1].ids)
            report.add("last_turn", done, f"its last {count} ids are none of the model's", where)

    async def _two_at_once(self) -> None:
        """Two samples of different prompts, interleaved."""
        done = "ran it for two samples at once"
        first, second = self._stand(self._manners()), self._stand(self._manners(texts=("2", *self._texts)))
        self._report.tries += 1
        other = asyncio.ensure_future(self._beside(second))
        tried = await try_it(
            self._agent.run(first.sample, first.context), limit_s=_LIMIT_S, after=first.context.work.close
        )
        await asyncio.wait({other}, timeout=_LIMIT_S)
        other.cancel()
        error = tried.error or (other.exception() if other.done() and not other.cancelled() else None)
        for _, happened, where in first.wrong + second.wrong:
            self._report.add("shared", done, happened, where)
        if error is not None and not isinstance(error, SampleFailure):
            self._report.add("shared", done, f"it raised {tell(error)}, and for one alone it did not", tried.where)

    async def _beside(self, stand: Stand) -> None:
        try:
            await self._agent.run(stand.sample, stand.context)
        finally:
            await stand.context.work.close()

    async def _odd(self, done: str, text: str) -> None:
        tried = await self._try(done, self._stand(self._manners(texts=(text, *self._texts))))
        if tried.outcome == "running" and not self._report.broken("ends"):
            self._report.add("ends", done, "it had not ended after an hour", tried.where)
        elif tried.error is not None and not isinstance(tried.error, SampleFailure | Runaway):
            self._report.add("raises", done, tried.told, tried.where)

    async def _cancelled(self, at: int) -> None:
        done = f"cancelled it at its await {at}"
        stand = self._stand(self._manners())
        tried = await self._try(done, stand, at=at, act=_cancel, limit_s=2 * ENDS_S)
        if not tried.acted or tried.outcome == "cancelled":
            return
        ran_on = f"it had not ended {ENDS_S:g} s after"
        happened = ran_on if tried.outcome == "running" else tried.told
        self._report.add("cancellation", done, happened, tried.where)

    async def _taken_back(self, at: int) -> None:
        done = f"took its sample back at its await {at}"
        stand = self._stand(self._manners())
        tried = await self._try(done, stand, at=at, act=lambda _: stand.take_back())
        self._look_at_passing(done, stand, tried)

    async def _paused(self, at: int, cut: Cut) -> None:
        """A pause begins at an await, and ends long after."""
        done = f"paused at its await {at}; {_CUT_WORDS[cut]}"
        stand = self._stand(self._manners(cut=cut))

        async def pause() -> None:
            stand.gate.close((LANE,), "abort")
            await asyncio.sleep(_LONG_S)
            stand.gate.open((LANE,))

        tried = await self._try(done, stand, at=at, act=lambda _: pause())
        if self._on_pause == "abort" and stand.noted:
            self._look_at_passing(done, stand, tried)
        else:
            self._look_at_patience(done, tried)

    async def _failing(self, call: int, error: Exception) -> None:
        done = f"had {type(error).__name__} raised by its engine call {call}"
        stand = self._stand(self._manners(failure=(call, error)))
        self._look_at_passing(done, stand, await self._try(done, stand))

    async def _slow(self) -> None:
        done = f"had every engine call take {_LONG_S:g} s"
        stand = self._stand(self._manners(latency_s=_LONG_S))
        self._look_at_patience(done, await self._try(done, stand, limit_s=100 * _LIMIT_S))

    # -- what is expected of them ----------------------------------------------------------------------------

    def _look_at_passing(self, done: str, stand: Stand, tried: Tried) -> None:
        """What was raised for it has to have gone through."""
        if isinstance(tried.error, StaleAttempt):
            return  # whatever of the context raised it
        if not stand.noted:
            self._look_at_patience(done, tried)
            return
        kinds = tuple(type(noted.error) for noted in stand.noted)
        if isinstance(tried.error, kinds):
            return
        raised = tell(stand.noted[0].error)
        self._report.add("passes_on", done, f"ctx raised {raised}; {tried.told}", stand.noted[0].where)

    def _look_at_patience(self, done: str, tried: Tried) -> None:
        """Nothing was raised for it: it has to have ended as it does without a pause."""
        if tried.outcome == "returned" or isinstance(tried.error, SampleFailure | Runaway):
            return
        happened = "it had not ended an hour after" if tried.outcome == "running" else tried.told
        self._report.add("pauses", done, happened, tried.where)


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
