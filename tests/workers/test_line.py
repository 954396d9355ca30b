"""The line for slots: first come, first served, and never a slot that is free while somebody waits."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.workers.line import Line
from tests.support.virtual import soon, virtual

FAR = 1e9


class Counter:
    """Slots and who got one, asking the line as the pool does."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.served: list[int] = []
        self.looks = 0
        self.line = Line(self.changed)

    def changed(self) -> None:
        if self.line:
            self.line.wake(self.free)

    async def claim(self, number: int) -> None:
        called = False
        while True:
            self.looks += 1
            if self.free and (called or not self.line):
                self.free -= 1
                self.served.append(number)
                return
            if not called:
                self.changed()
            called = await self.line.wait(str(number), "train", 0.0, FAR, again=called)


Move = st.sampled_from(("ask", "free", "told", "cancel", "turn"))


@given(slots=st.integers(1, 3), moves=st.lists(Move, max_size=60))
@virtual
async def test_whoever_asked_first_is_served_first(slots: int, moves: list[str]) -> None:
    """However often the line is told of a slot, and whoever leaves it: the order stays, and no slot stays free."""
    counter = Counter(slots)
    tasks: list[asyncio.Task[None]] = []
    for move in moves:
        if move == "ask":
            tasks.append(asyncio.ensure_future(counter.claim(len(tasks))))
        elif move == "free" and counter.free < slots:
            counter.free += 1
            counter.changed()
        elif move == "told":
            counter.changed()
        elif move == "cancel" and tasks:
            tasks[-1].cancel()
        elif move == "turn":
            await asyncio.sleep(0)
    await soon()
    assert counter.served == sorted(counter.served)
    waiting = [task for task in tasks if not task.done()]
    assert not (counter.free and waiting)
    assert len(counter.line) == len(waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not counter.line


@virtual
async def test_one_slot_calls_one() -> None:
    """Told three times of one free slot, the line calls one: nobody looks in vain, and nobody loses its place."""
    counter = Counter(1)
    tasks = [asyncio.ensure_future(counter.claim(number)) for number in range(4)]
    await soon()
    assert counter.looks == 4
    counter.free += 1
    for _ in range(3):
        counter.changed()
    await soon()
    assert (counter.served, counter.looks) == ([0, 1], 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
