"""Synchronous judgers for processes of their own: slow, broken and hostile ones."""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rollout_svc.errors import JudgeFailed, SampleFailure
from rollout_svc.judging import JudgedSample, Reward

__all__ = ["Breaks", "Counts", "Hangs", "Takes", "plain"]


class Takes:
    """Take some seconds, then give a reward."""

    def __init__(self, *, seconds: float = 0.0, value: Any = 1.0) -> None:
        self.seconds = seconds
        self.value = value

    def judge(self, sample: JudgedSample) -> Any:
        time.sleep(self.seconds)
        return self.value

    def judge_group_of(self, samples: list[JudgedSample]) -> list[float]:
        return [float(len(sample.response_ids)) for sample in samples]


class Hangs:
    """Tell the process's id through a pipe in the file system, then hang."""

    def __init__(self, *, fifo: str) -> None:
        self.fifo = fifo

    def judge(self, sample: JudgedSample) -> NoReturn:
        Path(self.fifo).write_text(str(os.getpid()), encoding="ascii")
        while True:
            time.sleep(60)


class Counts:
    """Say how many judgers this process has made, and which process it is."""

    made = 0

    def __init__(self) -> None:
        Counts.made += 1

    def judge(self, sample: JudgedSample) -> Reward:
        return Reward(Counts.made, {"pid": os.getpid()})


class _Unpicklable(Exception):
    """Survives pickling, but cannot be made again from it."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class _Shell:
    """A result that cannot be made again on the other side."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


class Breaks:
    """Fail in a way that is hard to carry from one process to another."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def judge(self, sample: JudgedSample) -> Any:
        if self.how == "raises":
            raise ValueError("as told")
        if self.how == "sample_failure":
            raise SampleFailure("mine", "as told")
        if self.how == "judge_failed":
            raise JudgeFailed("no_tests", "as told")
        if self.how == "unpicklable_error":
            raise _Unpicklable("two", "parts")
        if self.how == "unpicklable_result":
            return lambda: 1.0
        if self.how == "unloadable_result":
            return _Shell()
        if self.how == "exits":
            sys.exit(3)
        if self.how == "dies":
            os._exit(3)
        raise AssertionError(self.how)


def plain(sample: JudgedSample, *, bonus: float = 0.0) -> float:
    """Give a reward without any class around it."""
    return float(sample.response == sample.ground_truth) + bonus


async def awaited(sample: JudgedSample, *, bonus: float = 0.0) -> float:
    """Do the same, in the loop."""
    return plain(sample, bonus=bonus)


def together(samples: list[JudgedSample]) -> list[float]:
    """Give each sample the size of its group."""
    return [float(len(samples))] * len(samples)


async def awaited_together(samples: list[JudgedSample]) -> list[float]:
    """Do the same, in the loop."""
    return together(samples)
