"""Who waits for an engine: in line for a slot, or asleep between two tries.

Invariants:

- First come, first served, and as many are woken as there are slots; whoever is woken looks again before it acts.
- One that was woken and is cancelled passes its turn on.
- Thousands that are turned away at once leave a slice a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from rollout_svc.gate import Lane
from rollout_svc.signals import Waking

__all__ = ["Line", "Wait"]


class Wait(NamedTuple):
    """A sample that wants an engine and has none; `since` is loop time."""

    where: Literal["queued", "retrying"]
    since: float


class Line:
    """The line for slots, and the account of everyone who waits.

    Attributes:
        waits: by sample id, for those who wonder where a sample is.
    """

    def __init__(self, on_passed: Callable[[], None]) -> None:
        self.waits: dict[str, Wait] = {}
        self._queue: deque[tuple[Lane, asyncio.Future[None]]] = deque()
        self._waking = Waking()
        self._on_passed = on_passed

    async def wait(self, sample_id: str, lane: Lane, since: float, deadline: float) -> None:
        """Stand in line until woken, at most until `deadline`.

        Args:
            sample_id: who waits.
            lane: of which lane, for `turn_away`.
            since: loop time since when, however often it was woken.
            deadline: loop time.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.waits[sample_id] = Wait("queued", since)
        self._queue.append((lane, future))
        timer = loop.call_at(deadline, _wake, future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._on_passed()
            raise
        finally:
            self.waits.pop(sample_id, None)
            timer.cancel()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def wake(self, number: int) -> None:
        """Let that many look again."""
        while self._queue and number > 0:
            future = self._queue.popleft()[1]
            if not future.done():
                future.set_result(None)
                number -= 1

    def turn_away(self, lane: Lane) -> None:
        """Let everyone of a lane look again: its gate closed."""
        leaving = [future for waits_for, future in self._queue if waits_for == lane]
        self._queue = deque(entry for entry in self._queue if entry[0] != lane)
        self._waking.add(leaving)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
