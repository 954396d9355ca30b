"""Judgers for tests: they say what the test says, when it says so.

- A verdict is a number, a `Reward`, or an exception to raise; rubbish is passed on as it is.
- Nothing sleeps: a judge that is held answers when it is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_svc.judging import JudgedSample
from tests.support.bell import Bell

__all__ = ["GroupJudge", "Judge"]


class Judge:
    """Judges one sample at a time.

    Attributes to set at any time:
        verdict: the rule; asked when the judge would answer.
        hold: calls wait for `release`.
        deaf: a cancelled call waits on for its release, and then answers, as if nothing had been.

    Attributes to look at:
        seen: what it was asked, in order.
        cancelled: sample ids of calls that were cancelled.
        late: sample ids of deaf calls that answered after all.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.verdict: Callable[[JudgedSample], Any] = lambda _: 1.0
        self.hold = False
        self.deaf = False
        self.seen: list[JudgedSample] = []
        self.cancelled: list[str] = []
        self.late: list[str] = []
        self._held: list[asyncio.Event] = []

    @property
    def held(self) -> int:
        """Calls that wait."""
        return len(self._held)

    def release(self) -> int:
        """Let the calls that wait answer, and hold no more; say how many they were."""
        self.hold = False
        held, self._held = self._held, []
        for event in held:
            event.set()
        return len(held)

    async def judge(self, sample: JudgedSample) -> Any:
        """Give the verdict."""
        self.seen.append(sample)
        self.bell.ring()
        if self.hold:
            await self._wait(sample)
        verdict = self.verdict(sample)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    async def _wait(self, sample: JudgedSample) -> None:
        event = asyncio.Event()
        self._held.append(event)
        self.bell.ring()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancelled.append(sample.sample_id)
            self.bell.ring()
            if not self.deaf:
                self._held.remove(event)
                raise
            await event.wait()
            self.late.append(sample.sample_id)
            self.bell.ring()


class GroupJudge:
    """Judges a whole group at once; `hold` and `release` as for one sample."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.verdict: Callable[[list[JudgedSample]], Any] = lambda samples: [float(i) for i in range(len(samples))]
        self.hold = False
        self.seen: list[list[JudgedSample]] = []
        self._go_on = asyncio.Event()

    def release(self) -> None:
        """Let the calls that wait answer, and hold no more."""
        self.hold = False
        self._go_on.set()

    async def judge_group(self, samples: list[JudgedSample]) -> Any:
        """Give the verdicts."""
        self.seen.append(samples)
        self.bell.ring()
        if self.hold:
            await self._go_on.wait()
        verdict = self.verdict(samples)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict
