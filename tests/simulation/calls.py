"""Calls to something that may die: a service, or who coordinates several.

Invariant: each call is a task of its own over there, as an HTTP server would make it: a caller that leaves cancels that
task, and one whose service dies is told `Gone`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import LIFE
from tests.simulation.world import WORLD

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Callee", "Gone"]


class Gone(Exception):
    """Raised to a caller whose service died before it answered."""


class Callee:
    """One life of what is called.

    Attributes:
        number: of it.
        up: it was not killed.
        dropped: calls whose callers left, when, and the task that carried each.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.up = True
        self.dropped: list[tuple[str, float, asyncio.Task[Any]]] = []
        self._context = contextvars.Context()
        self._context.run(LIFE.set, number)
        self._context.run(WORLD.set, world)
        self._callers: dict[asyncio.Future[Any], None] = {}

    async def call(self, name: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a call and wait for what it answers or raises.

        Raises:
            Gone: the service died first.
        """
        if not self.up:
            raise Gone
        loop, answer = self.world.loop, self.world.future()
        work = loop.create_task(self._handle(make, answer), context=self._context)
        self._callers[answer] = None
        try:
            return await answer
        except asyncio.CancelledError:
            self.world.say("caller", "leaves", name)
            work.cancel()
            self.dropped.append((name, loop.time(), work))
            raise
        finally:
            self._callers.pop(answer, None)

    @staticmethod
    async def _handle(make: Callable[[], Coroutine[Any, Any, Any]], answer: asyncio.Future[Any]) -> None:
        try:
            result = await make()
        except Exception as error:  # noqa: BLE001 - carried over to the caller
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)

    def leave_callers(self) -> None:
        """Tell everybody who waits that it died."""
        for answer in self._callers:
            if not answer.done():
                answer.set_exception(Gone())
                answer.exception()  # whoever was leaving in this very turn does not look at it
        self._callers.clear()
