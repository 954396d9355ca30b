"""Environments for `multi_turn`: good ones, and such as misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tests.support.bell import Bell

__all__ = ["Counting", "Gated", "Hangs", "Scripted", "Unruly"]


class Scripted:
    """Lives in the loop, and does as the test says."""

    made: list[Scripted] = []  # noqa: RUF012 - the test empties it
    beginning: Any = None
    answers: list[Any] = []  # noqa: RUF012 - likewise

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.closed = 0
        Scripted.made.append(self)

    @classmethod
    def plan(cls, *answers: Any, beginning: Any = None) -> None:
        """Say what the next ones answer."""
        cls.made, cls.answers, cls.beginning = [], list(answers), beginning

    async def reset(self, sample: Any) -> Any:
        self.view = sample
        self.steps = list(Scripted.answers)
        return Scripted.beginning

    async def step(self, said: dict[str, Any]) -> Any:
        self.seen.append(said)
        answer = self.steps.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        if callable(answer):
            return await answer()
        return answer

    async def close(self) -> None:
        await asyncio.sleep(1.0)
        self.closed += 1


class Counting:
    """Not async: counts its steps, and tells in which process; `written` is told that it was closed."""

    def __init__(self, *, until: int = 2, written: str = "") -> None:
        self.until = until
        self.steps = 0
        self.written = written

    def reset(self, sample: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"count for {sample.ground_truth}"}]

    def step(self, said: dict[str, Any]) -> dict[str, Any]:
        self.steps += 1
        content = f"{self.steps} {os.getpid()}"
        return {"messages": [{"role": "user", "content": content}], "done": self.steps == self.until, "reward": 0.5}

    def close(self) -> None:
        if self.written:
            Path(self.written).write_text(f"closed after {self.steps}", encoding="ascii")


class Unruly:
    """Not async: cannot be pickled, raises, or exits, as told."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def reset(self, sample: Any) -> None:
        if self.how == "unpicklable":
            self.held = lambda: None

    def step(self, said: dict[str, Any]) -> Any:
        if self.how == "raises":
            raise ValueError("as told")
        raise SystemExit(3)


class Hangs:
    """Not async: tells its process's id through a pipe in the file system, then hangs."""

    def __init__(self, *, fifo: str) -> None:
        self.fifo = fifo

    def reset(self, sample: Any) -> None:
        return None

    def step(self, said: dict[str, Any]) -> None:
        Path(self.fifo).write_text(str(os.getpid()), encoding="ascii")
        while True:
            time.sleep(60)


class Gated:
    """Lives in the loop: answers its first turn when the test lets it, and is done with the second; 0.5 for each."""

    bell = Bell()
    doors: dict[str, asyncio.Event] = {}  # noqa: RUF012 - `prepare` makes them
    waiting: set[str] = set()  # noqa: RUF012 - likewise
    closed: list[str] = []  # noqa: RUF012 - likewise

    @classmethod
    def prepare(cls, bell: Bell) -> None:
        """Begin a test."""
        cls.bell, cls.doors, cls.waiting, cls.closed = bell, {}, set(), []

    @classmethod
    def let(cls, *names: str) -> None:
        """Let those go on whose prompt says this."""
        for name in names:
            cls.doors.setdefault(name, asyncio.Event()).set()

    async def reset(self, sample: Any) -> None:
        self.name = sample.prompt[0]["content"]
        self.turns = 0

    async def step(self, said: dict[str, Any]) -> dict[str, Any]:
        self.turns += 1
        if self.turns == 2:
            return {"done": True, "reward": 0.5}
        Gated.waiting.add(self.name)
        Gated.bell.ring()
        try:
            await Gated.doors.setdefault(self.name, asyncio.Event()).wait()
        finally:
            Gated.waiting.discard(self.name)
            Gated.bell.ring()
        return {"messages": [{"role": "user", "content": "on"}], "reward": 0.5}

    async def close(self) -> None:
        await asyncio.sleep(0.05)
        Gated.closed.append(self.name)
