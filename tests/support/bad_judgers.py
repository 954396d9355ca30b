"""Judgers that each do one thing wrong, and some that do everything right."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from rollout_svc.judging import JudgedSample, Reward

__all__: list[str] = []


def right(sample: JudgedSample) -> float:
    """What an answer is worth."""
    return float((sample.response or "").strip() == sample.ground_truth)


class GoodProcess:
    """In a process of its own."""

    def judge(self, sample: JudgedSample) -> float:
        return right(sample)


class GoodInstant(GoodProcess):
    instant = True


class GoodAsync:
    """It asks somebody, and tidies up when it is cancelled."""

    async def judge(self, sample: JudgedSample) -> Reward:
        try:
            await asyncio.sleep(0.2)
        finally:
            await asyncio.sleep(0.1)
        return Reward(right(sample), {"right": right(sample)})


class GoodGroup:
    async def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        await asyncio.sleep(0.2)
        return [right(sample) for sample in samples]


class NoMethod:
    pass


class Both(GoodProcess):
    def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        return [1.0 for _ in samples]


class TwoArguments:
    def judge(self, sample: JudgedSample, truth: str) -> float:
        return 1.0


class AsyncInstant(GoodAsync):
    instant = True


class Raises:
    instant = True

    def judge(self, sample: JudgedSample) -> float:
        return float(sample.meta["weight"])  # raised here


class RaisesElsewhere:
    """It raises in a process of its own."""

    def judge(self, sample: JudgedSample) -> float:
        return float(sample.meta["weight"])


class Fragile:
    """It takes for granted that there is an answer."""

    instant = True

    def judge(self, sample: JudgedSample) -> float:
        return float((sample.response or "").split()[0] == sample.ground_truth)


class NotANumber:
    instant = True

    def judge(self, sample: JudgedSample) -> float:
        return float("nan")


class Says:
    instant = True

    def judge(self, sample: JudgedSample) -> Any:
        return "right"


class OddParts:
    instant = True

    def judge(self, sample: JudgedSample) -> Reward:
        return Reward(1.0, {"style": "good"})  # type: ignore[dict-item]


class ShortList:
    """It leaves out who was wrong."""

    instant = True

    def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        return [right(sample) for sample in samples if right(sample)] or [0.0]


class Lone:
    """It knows what to do with one sample only."""

    instant = True

    def judge_group(self, samples: list[JudgedSample]) -> float:
        return 1.0


class Hangs:
    async def judge(self, sample: JudgedSample) -> float:
        await asyncio.get_running_loop().create_future()
        return 1.0


class HangsElsewhere:
    """It never ends, in a process of its own."""

    def judge(self, sample: JudgedSample) -> NoReturn:
        while True:
            time.sleep(60)


class Uncancellable:
    async def judge(self, sample: JudgedSample) -> float:
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            return 0.0
        return right(sample)


class Slow:
    """It takes its time in the event loop."""

    instant = True

    def judge(self, sample: JudgedSample) -> float:
        time.sleep(0.03)
        return right(sample)


class Spins:
    """It is called in the event loop, and never gives it back."""

    instant = True

    def judge(self, sample: JudgedSample) -> NoReturn:
        while True:
            pass


class Blocks:
    """It is async, and waits without await, once."""

    done = False

    async def judge(self, sample: JudgedSample) -> float:
        if not self.done:
            self.done = True
            time.sleep(0.4)  # noqa: ASYNC251 - that is what is wrong with it
        return right(sample)


class Guesses:
    instant = True

    def judge(self, sample: JudgedSample) -> float:
        return random.random()


class LeavesTask:
    async def judge(self, sample: JudgedSample) -> float:
        self.task = asyncio.create_task(asyncio.sleep(3600), name="forgotten")
        return right(sample)


class Forks:
    """It leaves a process behind in its own."""

    def judge(self, sample: JudgedSample) -> float:
        self.left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"])
        return right(sample)


class Threads:
    """It leaves a thread behind in its own process."""

    def judge(self, sample: JudgedSample) -> float:
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return right(sample)


class GoodPool:
    """It keeps threads that wait for work, and one that ends by itself."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor()

    def judge(self, sample: JudgedSample) -> float:
        threading.Thread(target=time.sleep, args=(0.05,)).start()
        return self.pool.submit(right, sample).result()


class Elsewhere:
    """It can be made in the first process only."""

    def __init__(self) -> None:
        if os.environ.setdefault("FIRST_PROCESS", str(os.getpid())) != str(os.getpid()):
            raise OSError("no licence for another")

    def judge(self, sample: JudgedSample) -> float:
        return right(sample)


class Ok:
    """In order; between colons its name is that of a picture."""

    def judge(self, sample: JudgedSample) -> float:
        return right(sample)


class Deaf:
    """No cancellation ends it, and nothing else."""

    async def judge(self, sample: JudgedSample) -> float:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(1)
