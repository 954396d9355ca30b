"""Threads in virtual time: each piece of work takes a while, sometimes a long one, and is done in one step.

Invariants:

- What was begun ends, whether anybody waits for it or not; what was not when its service closed them never begins.
- A result may have been made long before it is heard of: as when a thread is done and the loop is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from tests.simulation.life import Life

__all__ = ["SimThreads"]

T = TypeVar("T")
_USUALLY_S: Final = 0.004
_SLOW_S: Final = (0.2, 6.0)


class SimThreads:
    """One life's.

    Attributes:
        made: results that nobody has heard of.
    """

    def __init__(self, life: Life) -> None:
        self.made: dict[asyncio.Future[Any], Any] = {}
        self._life = life
        self._world = life.world
        self._rng = Random(f"{life.world.seed}:threads:{life.number}")
        self._closed = False

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do it after a while."""
        world, result = self._world, self._world.future()
        if world.faults.draw(("experts_slow",)):
            world.spawn(self._slowly(work, result))
        else:
            world.later(self._rng.uniform(0.0005, _USUALLY_S), self._finish, work, result)
        return result

    async def _slowly(self, work: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        strike, early = self._world.faults.strike("experts_slow"), self._rng.random() < 0.5
        if early:
            self._begin(work, result)
        try:
            await self._world.at_most(self._rng.uniform(*_SLOW_S))
        finally:
            strike.end()
        self._finish(work, result)

    def _begin(self, work: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        try:
            self.made[result] = work()
        except Exception as error:  # noqa: BLE001 - carried over to whoever waits
            self.made[result] = error

    def _finish(self, work: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        if not self._life.up:
            return  # the process is gone
        if result not in self.made:
            if self._closed:
                result.cancel()
                return
            self._begin(work, result)
        made = self.made.pop(result)
        if isinstance(made, Exception):
            result.set_exception(made)
        else:
            result.set_result(made)

    async def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
