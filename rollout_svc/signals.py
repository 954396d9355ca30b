"""Awaiting a gate: the async side of `gate.py`.

Invariants:

- A waiter looks at the state first and again after every wake-up, so a change between look and wait is not missed.
- A waiter that is cancelled leaves nothing behind.
- Thousands that wait are woken a slice a turn, oldest first: a change of the gate never holds the loop. Whoever is
  woken late looks at the state as it is then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from rollout_svc.gate import Gate, Lane

__all__ = ["GateSignals", "Waking"]

_SLICE: Final = 32  # waiters woken in one turn: each goes on to send a request, 0.1-0.2 ms


class Waking:
    """Wakes futures a slice a turn, in the order they were given."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()

    def add(self, futures: Iterable[asyncio.Future[None]]) -> None:
        """Wake these: the first slice at once, the rest in the turns after this one."""
        under_way = bool(self._due)
        self._due.extend(futures)
        if not under_way:
            self._some()

    def _some(self) -> None:
        due, woken = self._due, 0
        while due and woken < _SLICE:
            future = due.popleft()
            if not future.done():
                future.set_result(None)
                woken += 1
        if due:
            due[0].get_loop().call_soon(self._some)


class GateSignals:
    """Lets coroutines wait for a lane to open, or sleep until it closes."""

    __slots__ = ("_gate", "_waiting", "_waking")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: dict[asyncio.Future[None], Lane] = {}
        self._waking = Waking()
        gate.subscribe(self._changed)

    def is_open(self, lane: Lane) -> bool:
        """Whether new work of this lane may start."""
        return self._gate.is_open(lane)

    async def wait_open(self, lane: Lane) -> None:
        """Return once the lane is open; it may have closed again when the caller runs: look again before acting."""
        while not self._gate.is_open(lane):
            await self._next_change(lane, None)

    async def sleep_while_open(self, lane: Lane, seconds: float) -> bool:
        """Sleep, but no longer than the lane stays open; returns whether the full time passed with it open."""
        end = asyncio.get_running_loop().time() + seconds
        while self._gate.is_open(lane):
            if asyncio.get_running_loop().time() >= end:
                return True
            await self._next_change(lane, end)
        return False

    async def _next_change(self, lane: Lane, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = lane
        timer = None if deadline is None else loop.call_at(deadline, self._wake, future)
        try:
            await future
        finally:
            self._waiting.pop(future, None)
            if timer is not None:
                timer.cancel()

    @staticmethod
    def _wake(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def _changed(self, lane: Lane) -> None:
        self._waking.add(future for future, waits_for in self._waiting.items() if waits_for == lane)
