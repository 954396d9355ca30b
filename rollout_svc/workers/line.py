"""Who waits for an engine: in line for a slot, or asleep between two tries.

Invariants:

- First come, first served: as many are called as there are slots that nobody was called for yet, whoever comes while
  somebody waits stands behind, and one that was called in vain goes back to the front.
- Whoever is called looks again before it acts. One that is cancelled then passes its turn on.
- Thousands that are turned away at once leave a slice a turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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
        self._queue: OrderedDict[asyncio.Future[None], Lane] = OrderedDict()
        self._called: set[asyncio.Future[None]] = set()  # have their turn, and have not looked yet
        self._waking = Waking()
        self._on_passed = on_passed

    async def wait(self, sample_id: str, lane: Lane, since: float, deadline: float, *, again: bool = False) -> bool:
        """Stand in line until woken, at most until `deadline`; returns whether it is called: a slot is meant for it.

        Args:
            sample_id: who waits.
            lane: of which lane, for `turn_away`.
            since: loop time since when, however often it was woken.
            deadline: loop time.
            again: it was called already, and found no slot.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.waits[sample_id] = Wait("queued", since)
        self._queue[future] = lane
        if again:
            self._queue.move_to_end(future, last=False)
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
            self._queue.pop(future, None)
            timer.cancel()
        called = future in self._called
        self._called.discard(future)
        return called

    def __bool__(self) -> bool:
        """Whether somebody is before whoever comes now."""
        return bool(self._queue or self._called)

    def __len__(self) -> int:
        return len(self._queue) + len(self._called)

    def wake(self, number: int) -> None:
        """Have that many called in all, those included that have not looked since."""
        while self._queue and len(self._called) < number:
            future, _ = self._queue.popitem(last=False)
            if not future.done():
                future.set_result(None)
                self._called.add(future)

    def turn_away(self, lane: Lane) -> None:
        """Let everyone of a lane look again: its gate closed."""
        leaving = [future for future, waits_for in self._queue.items() if waits_for == lane]
        for future in leaving:
            del self._queue[future]
        self._waking.add(leaving)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
