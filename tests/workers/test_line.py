"""The line for slots: who goes next, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.gate import LANES, Lane
from rollout_svc.workers.line import Line
from tests.support.virtual import soon, virtual

FAR = 1e6


class Counter:
    """Slots behind a line, as the pool has them: a newcomer takes one only where nobody waits."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.served: list[str] = []
        self.line = Line(self.look)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Wake as many as there are slots."""
        if self.line:
            self.line.wake(self.free)

    def give(self) -> None:
        """A slot becomes free."""
        self.free += 1
        self.look()

    def come(self, name: str, lane: Lane) -> None:
        """Somebody wants a slot."""
        self.tasks[name] = asyncio.get_running_loop().create_task(self.want(name, lane))

    async def want(self, name: str, lane: Lane) -> None:
        """Get one, in turn."""
        called = False
        while not self.free or not (called or not self.line):
            called = await self.line.wait(name, lane, 0.0, FAR, again=called)
        self.free -= 1
        self.served.append(name)


@virtual
async def test_lanes_take_turns_and_each_is_served_in_order() -> None:
    """However many of one lane wait, every second slot that frees is the other's while it waits."""
    desk = Counter(0)
    for n in range(6):
        desk.come(f"e{n}", "eval")
    await soon()
    for n in range(2):
        desk.come(f"t{n}", "train")
    await soon()
    for _ in range(8):
        desk.give()
        await soon()
    assert desk.served == ["e0", "t0", "e1", "t1", "e2", "e3", "e4", "e5"]


@virtual
async def test_nobody_overtakes_one_who_was_woken() -> None:
    """A slot that was called out is kept for whoever was woken for it, though another asks first."""
    desk = Counter(0)
    desk.come("first", "eval")
    await soon()
    desk.give()
    asks = desk.want("second", "train")  # in this very step, before the other has run
    asked = asyncio.get_running_loop().create_future()
    steps = asks.__await__()
    waits_for = next(steps, asked)
    assert waits_for is not asked  # it stands in line
    asks.close()
    await soon()
    assert desk.served == ["first"]


@virtual
async def test_a_turn_is_passed_on() -> None:
    """One that is cancelled when it was woken leaves its slot to the next."""
    desk = Counter(0)
    desk.come("a", "train")
    desk.come("b", "train")
    await soon()
    desk.give()
    desk.tasks["a"].cancel()
    await soon()
    assert desk.served == ["b"]
    assert not desk.line


@given(st.integers(0, 3), st.lists(st.sampled_from(["train", "eval", "give", "run", "cancel"]), max_size=40))
@virtual
async def test_no_slot_is_free_while_somebody_waits(slots: int, steps: list[str]) -> None:
    """After any history: a slot is free or somebody waits, never both, and whoever waits came last of its lane."""
    desk, waiting = Counter(slots), deque[str]()
    for number, step in enumerate(steps):
        if step == "give":
            desk.give()
        elif step == "run":
            await soon()
        elif step == "cancel" and waiting:
            desk.tasks[waiting.popleft()].cancel()
        elif step in LANES:
            desk.come(f"{step}{number:03}", "train" if step == "train" else "eval")
            waiting.append(f"{step}{number:03}")
    await soon()
    undone = [name for name, task in desk.tasks.items() if not task.done()]
    assert not (undone and desk.free), (undone, desk.free, desk.served)
    assert len(desk.line.waits) == len(undone)
    for lane in LANES:
        served = [name for name in desk.served if name.startswith(lane)]
        waits = [name for name in undone if name.startswith(lane)]
        assert not (served and waits) or max(served) < min(waits)
    for task in desk.tasks.values():
        task.cancel()
    await soon()
    assert not any((desk.line.waits, desk.line._called))
