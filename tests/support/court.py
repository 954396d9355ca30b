"""A judger's desk with all that runs it, and judgers that do as they are told."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollout_svc.errors import SampleFailure
from rollout_svc.gate import LANES, Gate, Lane
from rollout_svc.judging import JudgeDesk, JudgedSample, Judging, ProcessRunner, Reward
from rollout_svc.plugins import PluginSpec
from rollout_svc.tasks import TaskOwner

__all__ = ["TIMEOUT_S", "Court", "Judger", "a_sample", "now", "reason_of", "takes"]

TIMEOUT_S = 10.0


def a_sample(number: int = 0, *, response: str | None = "text", truth: Any = "truth") -> JudgedSample:
    """Make what a judger sees."""
    return JudgedSample(f"s{number}", "g", "t", None, [1], response, [2, 3], truth, {}, "stop")


class Judger:
    """An async judger that does as it is told, and counts what it was asked."""

    def __init__(self, behave: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.behave = behave
        self.started = 0
        self.running = 0
        self.most = 0

    async def judge(self, sample: JudgedSample) -> Any:
        self.started += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.behave()
        finally:
            self.running -= 1


def takes(seconds: float, result: Any = 1.0) -> Judger:
    """Make a judger that takes its time."""

    async def behave() -> Any:
        await asyncio.sleep(seconds)
        return result

    return Judger(behave)


class Court:
    """A judger's desk, the gate before it, and everything that runs it."""

    def __init__(self, judger: Any, *, concurrency: int | None = None, processes: ProcessRunner | None = None) -> None:
        self.gate = Gate()
        self.tasks = TaskOwner()
        self.judging = Judging(gate=self.gate, tasks=self.tasks, processes=processes)
        self.desk = JudgeDesk(
            name="j", judger=judger, spec=PluginSpec("m:a", {}), timeout_s=TIMEOUT_S, concurrency=concurrency
        )
        self.judging.add_desk(self.desk)

    def ask(self, number: int = 0, lane: Lane = "train") -> asyncio.Task[list[Reward]]:
        """Ask for a verdict, in a task of its own."""
        return asyncio.create_task(self.judging.judge(self.desk, lane, [a_sample(number)]))

    def ask_for_group(self, size: int) -> asyncio.Task[list[Reward]]:
        """Ask for the verdicts of a group."""
        samples = [a_sample(number) for number in range(size)]
        return asyncio.create_task(self.judging.judge(self.desk, "train", samples))

    def empty(self) -> bool:
        """Whether nothing is left of any call."""
        return not self.judging.calls and self.desk.running == 0 and self.judging.pending(LANES) == 0


async def reason_of(call: asyncio.Task[list[Reward]]) -> str:
    """Await a call that must fail as the sample's; returns its reason."""
    with pytest.raises(SampleFailure) as caught:
        await call
    return caught.value.reason


def now() -> float:
    return asyncio.get_running_loop().time()
