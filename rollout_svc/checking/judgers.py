"""What is tried with a judger: right, wrong and odd answers, groups of several sizes, cancellation, time-outs.

Invariants:

- It is called as the service calls it: by `Judging`, in the loop, or in a process of its own that can be killed.
- A judger that fails by itself ends the check: what would follow from that is not told as well.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from rollout_svc.checking import places
from rollout_svc.checking.clock import CheckLoop
from rollout_svc.checking.findings import Report
from rollout_svc.checking.leftovers import Before, left_since
from rollout_svc.checking.processes import Processes
from rollout_svc.checking.stepping import Runaway
from rollout_svc.checking.tongue import spoken
from rollout_svc.checking.trying import points, tell, try_it
from rollout_svc.errors import SampleFailure
from rollout_svc.gate import Gate
from rollout_svc.judging import JudgeDesk, JudgedSample, Judging, Reward
from rollout_svc.plugins import PluginSpec
from rollout_svc.prompt import Prompt
from rollout_svc.tasks import TaskOwner

__all__ = ["RULES", "JudgerCheck"]

RULES: Final = MappingProxyType(
    {
        "attributes": "judge(self, sample) or judge_group(self, samples), one of the two, async or not; instant = True "
        "only where it is not async",
        "process": "a judger that is not async can be made in another process, from module:attr and its options",
        "raises": "every answer that a model may give is worth something: it raises only where it cannot judge at all",
        "value": "a reward is a finite number or a Reward of one, its parts finite numbers by name",
        "group": "judge_group gives a list of one reward for each sample, in order, for groups of any size",
        "ends": "it has an answer before its timeout_s",
        "cancellation": "asyncio.CancelledError goes through, after a short clean-up at most",
        "instant": "instant = True is for what only compares: it is called in the event loop",
        "deterministic": "the same answer is worth the same each time",
        "left_running": "no task, thread or process outlives the call",
        "holds_loop": "nothing blocks the event loop: what computes or waits without await is not async",
    }
)

_SIZES: Final = (1, 2, 8)
_LIMIT_S: Final = 60.0
_INSTANT_S: Final = 0.02  # for one call: what takes longer stalls every other sample
_SLOWEST_OF: Final = 3  # calls; the quickest counts, so that a busy machine is not the judger's fault
_ODD: Final = {
    "an empty answer": "",
    "blanks": " \n ",
    "nonsense": "\x00}{\\boxed{((( <tool_call>",
    "a long answer": "so then " * 2000,
    "a number without an end": "7" * 5000,
    "letters of other tongues": "答案是四 ½ \U0001f600",
}


class JudgerCheck:
    """Tries a judger, and puts what it finds into a report."""

    def __init__(
        self,
        judger: Any,
        spec: PluginSpec,
        report: Report,
        prompt: Prompt,
        responses: Sequence[str],
        processes: Processes,
        *,
        timeout_s: float,
        deterministic: bool,
        parts: Mapping[str, JudgeDesk] | None = None,
    ) -> None:
        self._judger = judger
        self._spec = spec
        self._report = report
        self._prompt = prompt
        self._responses = tuple(responses)
        self._processes = processes
        self._timeout_s = timeout_s
        self._deterministic = deterministic
        self._parts = dict(parts or {})
        self._judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=processes)
        self._where = ""

    def look(self) -> bool:
        """Look at it without calling it; returns whether it can be called."""
        judger, report, done = self._judger, self._report, "looked at it"
        kind = judger if inspect.isfunction(judger) else type(judger)
        methods = [name for name in ("judge", "judge_group") if callable(getattr(judger, name, None))]
        if len(methods) != 1:
            told = "neither judge nor judge_group" if not methods else "both judge and judge_group: one is never called"
            report.add("attributes", done, f"it has {told}", places.of_thing(kind))
            return False
        method = getattr(judger, methods[0])
        self._where = places.of_thing(method)
        try:
            inspect.signature(method).bind(None)
        except TypeError as error:
            report.add("attributes", done, f"{methods[0]} takes other arguments: {error}", self._where)
            return False
        except ValueError:
            pass  # made in C: it does not say
        if getattr(judger, "instant", False) and inspect.iscoroutinefunction(method):
            report.add("attributes", done, "it is async and says instant = True, which has no effect", self._where)
            return False
        return True

    async def run(self) -> None:
        """Try everything, and have it give back what it holds."""
        desk = JudgeDesk(name="it", judger=self._judger, spec=self._spec, timeout_s=self._timeout_s, parts=self._parts)
        self._judging.add_desk(desk)
        try:
            await self._try_all(desk)
        finally:
            await self._judging.close()

    async def _try_all(self, desk: JudgeDesk) -> None:
        if not desk.is_async and not desk.instant and not self._can_travel():
            return
        answers = {"the ground truth": str(self._prompt.ground_truth), "a wrong answer": "I do not know."}
        given = {f"answer {number}": text for number, text in enumerate(self._responses, 1)}
        for what, text in {**(given or answers), **_ODD}.items():
            if not await self._judge(desk, f"had it judge {what}", [self._sample(text)]):
                return
        if desk.by_group:
            for size in _SIZES[1:]:
                texts = [*(given or answers).values()]
                samples = [self._sample(texts[k % len(texts)], k) for k in range(size)]
                if not await self._judge(desk, f"had it judge a group of {size}", samples):
                    return
        if desk.instant:
            self._look_at_time(desk)
        if desk.is_async:
            await self._cancelled(desk)
        if self._deterministic:
            await self._twice(desk)

    # -- calls -----------------------------------------------------------------------------------------------

    def _sample(self, text: str, number: int = 0) -> JudgedSample:
        prompt = self._prompt
        return JudgedSample(
            sample_id=f"check.{number}",
            group_id="check",
            task=prompt.task,
            prompt=prompt.content,
            prompt_ids=list(prompt.input_ids),
            response=text,
            response_ids=spoken(text),
            ground_truth=prompt.ground_truth,
            meta=dict(prompt.meta),
            finish_reason="stop",
            reported=1.0,
        )

    async def _verdict(self, desk: JudgeDesk, samples: list[JudgedSample]) -> list[Reward] | SampleFailure:
        self._report.tries += 1
        try:
            return await self._judging.judge(desk, "train", samples)
        except SampleFailure as failure:
            return failure

    async def _judge(self, desk: JudgeDesk, done: str, samples: list[JudgedSample]) -> bool:
        """One call; returns whether more of them make sense."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CheckLoop)  # noqa: S101 - whoever checks made it
        before = Before(loop)
        orphans = self._processes.below()
        verdict = await self._verdict(desk, samples)
        report = self._report
        for left in [*await left_since(before, loop), *await self._processes.threads()]:
            report.add("left_running", done, left.what, left.where or self._where)
        for pid in sorted(self._processes.below() - orphans):
            report.add("left_running", done, f"the process {pid} runs on", self._where)
        if not isinstance(verdict, SampleFailure):
            wrong = next((told for reward in verdict if (told := _wrong_parts(reward))), None)
            if wrong is not None:
                report.add("value", done, wrong, self._where)
            return wrong is None and not report.broken("left_running")
        happened, where = places.split(verdict.message.removeprefix("it: "))
        rule = {"judge_timeout": "ends", "judge_invalid": "value"}.get(verdict.reason, "raises")
        if rule == "value" and happened.startswith("expected a list"):
            rule = "group"
        elif rule == "raises" and happened.startswith("ConfigError: "):  # made here, and not there
            rule = "process"
        if not _was_freed(verdict):
            report.add(rule, done, happened, where or self._where)
        return False

    # -- what is tried ---------------------------------------------------------------------------------------

    def _can_travel(self) -> bool:
        try:
            pickle.dumps(self._spec)
        except Exception as error:  # noqa: BLE001 - an option of the user's making
            self._report.add("process", "sent its options to a process", tell(error), self._where)
            return False
        return True

    def _look_at_time(self, desk: JudgeDesk) -> None:
        """The quickest of a few calls with a long answer."""
        sample = self._sample(_ODD["a long answer"])
        took = []
        for _ in range(_SLOWEST_OF):
            began = time.perf_counter()
            desk.call([sample] if desk.by_group else sample)
            took.append(time.perf_counter() - began)
        if min(took) > _INSTANT_S:
            happened = f"it took {min(took) * 1000:.0f} ms; more than {_INSTANT_S * 1000:.0f} is not instant"
            self._report.add("instant", "had it judge a long answer", happened, self._where)

    async def _cancelled(self, desk: JudgeDesk) -> None:
        """Cancel it at each of its awaits."""
        samples = [self._sample("I do not know.")]
        plain = await try_it(self._judging.work_of(desk, "train", samples), limit_s=_LIMIT_S)
        for at in points(plain.waits):
            done = f"cancelled it at its await {at}"
            self._report.tries += 1
            work = self._judging.work_of(desk, "train", samples)
            tried = await try_it(work, limit_s=_LIMIT_S, at=at, act=_cancel)
            for left in tried.left:
                self._report.add("left_running", done, left.what, left.where or self._where)
            if tried.acted and tried.outcome != "cancelled":
                happened = "it had not ended a minute after" if tried.outcome == "running" else tried.told
                self._report.add("cancellation", done, happened, tried.where)

    async def _twice(self, desk: JudgeDesk) -> None:
        for text in (str(self._prompt.ground_truth), "I do not know."):
            sample = self._sample(text)
            one = await self._verdict(desk, [sample])
            other = await self._verdict(desk, [replace(sample, sample_id="check.1")])
            if one != other and not isinstance(one, SampleFailure) and not isinstance(other, SampleFailure):
                happened = f"it was worth {one[0].value:g}, and then {other[0].value:g}"
                self._report.add("deterministic", "had it judge the same answer twice", happened, self._where)
                return


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


def _was_freed(error: BaseException | None) -> bool:
    """Whether it held the loop, and was made to let go: that is told by itself."""
    while error is not None and not isinstance(error, Runaway):
        error = error.__cause__
    return error is not None


def _wrong_parts(reward: Reward) -> str | None:
    """What is wrong with the named parts of a reward; None: nothing."""
    parts: Any = reward.parts
    if not isinstance(parts, dict):
        return f"the parts of its Reward are {parts!r:.100}, not a dict"
    for name, value in parts.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(name, str) or not number or not float("-inf") < value < float("inf"):
            return f"the part {name!r:.50} of its Reward is {value!r:.50}"
    return None
