"""Judgers to be parts of others, where they run told by what they give."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NoReturn

from rollout_svc.judging import JudgedSample, Reward

__all__ = ["Awaited", "Forgetful", "Group", "Here", "Never", "Where"]


class Where:
    """Synchronous: gives the process it ran in as a part."""

    def judge(self, sample: JudgedSample) -> Reward:
        return Reward(0.5, {"pid": os.getpid()})


class Here:
    """Instant: the same, in the loop."""

    instant = True

    def judge(self, sample: JudgedSample) -> Reward:
        return Reward(0.25, {"pid": os.getpid()})


class Awaited:
    """Asynchronous: takes its time, then gives a value or raises."""

    def __init__(self, *, value: Any = 1.0, seconds: float = 0.0, raises: str | None = None) -> None:
        self.value = value
        self.seconds = seconds
        self.raises = raises
        self.asked = self.cancelled = self.closed = 0

    async def judge(self, sample: JudgedSample) -> Any:
        self.asked += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.raises is not None:
            raise ValueError(self.raises)
        return self.value

    async def close(self) -> None:
        self.closed += 1


class Forgetful:
    """Asks one judger, and never gives a verdict."""

    def __init__(self, *, seconds: float) -> None:
        self.others = {"a": {"path": "tests.support.composed:Awaited", "seconds": seconds, "timeout_s": 100.0}}
        self.ask: Any = None

    async def judge(self, sample: JudgedSample) -> NoReturn:
        await asyncio.sleep(2)
        await self.ask("a", sample)
        await asyncio.Event().wait()
        raise AssertionError


class Never:
    """Synchronous, and never done."""

    def judge(self, sample: JudgedSample) -> NoReturn:
        while True:
            pass


class Group:
    """Judges whole groups."""

    def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        return [1.0] * len(samples)
