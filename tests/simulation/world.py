"""What is outside the service in one history: engines, the seed's dice, what went wrong, what was said.

Invariants:

- Its timers belong to no life of the service: a crash does not stop them.
- The first broken promise ends the history; it is kept, and nothing is raised where the service could swallow it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.chronicle import Chronicle
from tests.simulation.durable import Durable
from tests.simulation.engine import SimEngine
from tests.simulation.faults import STANDS, Faults, Strike
from tests.simulation.loop import SimLoop
from tests.simulation.tokens import Tokens
from tests.support.journals import memory_database

if TYPE_CHECKING:
    from rollout_svc.engines import Reply
    from tests.simulation.judges import Verdict
    from tests.simulation.life import Life

__all__ = ["WORLD", "Broken", "World", "current"]

WORLD: contextvars.ContextVar[World] = contextvars.ContextVar("WORLD")
"""Whose world code of a service belongs to: set for each life, beside its number."""

_AMBUSHED: Final = (*STANDS[1:], "tasks", "report", "paused", "paused")  # seldom met otherwise


class Broken(AssertionError):
    """Raised when a history broke a promise; says which."""


class World:
    """One history's surroundings."""

    def __init__(self, seed: int | str, loop: SimLoop, *, telling: bool = True) -> None:
        self.seed = seed
        self.telling = telling
        self.loop = loop
        self.rng = Random(f"{seed}:world")
        self.chronicle = Chronicle()
        self.faults = Faults(Random(f"{seed}:faults"))
        self.tokens = Tokens()
        self.engines: dict[str, SimEngine] = {}
        self.last_answers: dict[str, Reply] = {}
        self.verdicts: list[Verdict] = []
        self.filter_rng = Random(f"{seed}:filter calls")
        self.asked: dict[str, str | None] = {}  # what a filter said last of a group: a reason, `kept`, or nothing yet
        self.journal: set[str] = set()  # groups that were saved
        self.routed = 0  # requests that asked for routed experts
        self.declined: dict[str, tuple[int, int]] = {}  # whose loop asked for none in a turn: life and attempt
        self.disk = memory_database()
        self.durable = Durable(self)
        self.lives: list[Life] = []
        self.broken: Broken | None = None
        self.service_died: Callable[[], None] = lambda: None
        self._context = contextvars.Context()
        self._held: dict[asyncio.Future[None], None] = {}
        self._sent: dict[asyncio.Future[None], None] = {}
        self._to_resume: dict[asyncio.Future[None], None] = {}
        self._ambushes: dict[asyncio.Future[None], str] = {}
        self.faults.on_stand = self._stands

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    @property
    def life(self) -> Life:
        """The service as it is now."""
        return self.lives[-1]

    def say(self, actor: str, what: str, *details: Any) -> None:
        """Keep something for the history, where it is to be read: a seed tells the same again whenever it is asked."""
        if not self.telling:
            return
        self.chronicle.add(self.loop.time(), actor, what, *map(str, details))

    def breaks(self, promise: str, how: str) -> None:
        """A promise is broken: the history ends after this turn."""
        if self.broken is None:
            self.say("PROMISE", promise, how)
            self.broken = Broken(f"{promise}: {how}")

    def require(self, holds: bool, promise: str, how: str) -> None:
        """Break a promise unless something holds."""
        if not holds:
            self.breaks(promise, how)

    def saved(self, group_id: str) -> None:
        """A whole group is durable."""
        self.journal.add(group_id)
        self.say("journal", "has", group_id[-6:])

    # -- time ------------------------------------------------------------------------------------------------

    def future(self) -> asyncio.Future[Any]:
        """Make a future of the world's."""
        return self.loop.create_future()

    def later(self, delay: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call something later, whatever becomes of the service."""
        return self.loop.call_later(delay, callback, *args, context=self._context)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Start a task of the world's."""
        return self.loop.create_task(coroutine, context=self._context)

    async def at_most(self, seconds: float, *, sent: bool = False) -> None:
        """Wait that long, or until everything is healed; what was `sent`, no longer than its sender lives.

        What a dead process has sent is in its engine's socket, and is read before what its successor sends.
        """
        if self.faults.healed:
            return
        future = self.future()
        self._held[future] = None
        if sent:
            self._sent[future] = None
        timer = self.later(seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._held.pop(future, None)
            self._sent.pop(future, None)

    def arrive(self) -> None:
        """Let everything that was sent arrive: its sender died."""
        for future in self._sent:
            _wake(future)

    async def until_resumed(self) -> None:
        """Wait until a stage that is paused, or the next that will be, is resumed."""
        if self.faults.healed:
            return
        future = self.future()
        self._to_resume[future] = None
        timer = self.later(10.0, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._to_resume.pop(future, None)

    async def ambush(self) -> None:
        """Sometimes wait until a climb stands at a rung of the seed's choice: faults like to strike just there."""
        if self.faults.healed or self.rng.random() < 0.5:
            return
        future = self.future()
        self._ambushes[future] = self.rng.choice(_AMBUSHED)
        timer = self.later(self.rng.uniform(0.5, 3.0), _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._ambushes.pop(future, None)

    def _stands(self, where: str) -> None:
        for future, wanted in tuple(self._ambushes.items()):
            if wanted == where:
                _wake(future)

    def resumed(self) -> None:
        """The stage runs again: answers that were held until then come now."""
        for future in tuple(self._to_resume):
            self.later(self.rng.uniform(0.0, 0.05), _wake, future)

    # -- health ----------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End everything that goes wrong, for good."""
        self.say("world", "heals")
        self.faults.healed = True
        for engine in self.engines.values():
            if not engine.up:
                engine.come_back(engine.weights)
            engine.refusing = False
            if engine.frozen:
                engine.thaw()
            engine.set_slowness(1.0)
            engine.unstick()
            if engine.lied:
                engine.restart()
        for future in (*self._held, *self._to_resume, *self._ambushes):
            _wake(future)
        for strike in tuple(self.faults.live):
            strike.end()

    def strike_for(self, name: str, seconds: float, undo: Callable[[], None]) -> Strike:
        """Let a fault last a while, then undo it, unless the history was healed before."""
        strike = self.faults.strike(name)

        def end() -> None:
            strike.end()
            if not self.faults.healed:
                undo()

        self.later(seconds, end)
        return strike


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def current() -> World:
    """The world of the service that runs this: plugins are made by the service and find it here."""
    return WORLD.get()
