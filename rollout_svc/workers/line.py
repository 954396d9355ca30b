"""Who waits for an engine: in line for a slot, or asleep between two tries.

Invariants:

- Within a lane first come, first served; where both lanes wait they take turns, so that neither starves the other.
- As many are woken as there are slots, and nobody who comes later overtakes those in line, or those who were woken and
  have not run since. Whoever is woken looks again before it acts, and keeps its place if there is nothing after all.
- One that was woken and is cancelled passes its turn on.
- Thousands that are turned away at once leave a slice a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from rollout_svc.gate import LANES, Lane
from rollout_svc.signals import Waking

__all__ = ["Line", "Wait"]

_OTHER: Final[dict[Lane, Lane]] = {"train": "eval", "eval": "train"}


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
        self._queues: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in LANES}
        self._called: set[asyncio.Future[None]] = set()  # woken for a slot, and not run since
        self._turn: Lane = "eval"
        self._waking = Waking()
        self._on_passed = on_passed

    async def wait(self, sample_id: str, lane: Lane, since: float, deadline: float, *, again: bool = False) -> bool:
        """Stand in line until woken, at most until `deadline`; returns whether it was for a slot.

        Args:
            sample_id: who waits.
            lane: of which lane.
            since: loop time since when, however often it was woken.
            deadline: loop time.
            again: it was woken for a slot that was gone: it keeps its place.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.waits[sample_id] = Wait("queued", since)
        queue = self._queues[lane]
        if again:
            queue.appendleft(future)
        else:
            queue.append(future)
            self._on_passed()  # there may be a slot all the same: it only must not overtake those before it
        timer = loop.call_at(deadline, _wake, future)
        try:
            await future
        except asyncio.CancelledError:
            if future in self._called:
                self._called.discard(future)
                self._on_passed()
            raise
        finally:
            self.waits.pop(sample_id, None)
            timer.cancel()
        called = future in self._called
        self._called.discard(future)
        return called

    def __bool__(self) -> bool:
        """Whether somebody waits, or was woken and has not run since."""
        return bool(self._called) or any(self._queues.values())

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def looking(self) -> int:
        """How many there are that wait, or were woken and have not run since: no more slots are of use."""
        return len(self) + len(self._called)

    def wake(self, number: int) -> None:
        """Let that many look again, those included who were woken and have not run since."""
        number -= len(self._called)
        while number > 0:
            queue = self._queues[self._turn] or self._queues[_OTHER[self._turn]]
            if not queue:
                return
            future = queue.popleft()
            if not future.done():
                future.set_result(None)
                self._called.add(future)
                number -= 1
                self._turn = "train" if queue is self._queues["eval"] else "eval"

    def wake_more(self, number: int) -> None:
        """There are that many slots more than there were: let as many more look again."""
        self.wake(len(self._called) + number)

    def wake_all(self) -> None:
        """Let everyone look again: there is nothing to wait for."""
        for lane in LANES:
            self.turn_away(lane)

    def turn_away(self, lane: Lane) -> None:
        """Let everyone of a lane look again: its gate closed."""
        leaving = tuple(self._queues[lane])
        self._queues[lane].clear()
        self._waking.add(leaving)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
