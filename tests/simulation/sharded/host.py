"""One shard's machine: its engines, its journal, and one life of its service after the other.

Invariants:

- It has a world of its own (dice, engines, disk, faults) in the history's loop; tokens and verdicts are the history's.
- A service that was killed is made again from its journal after a while, held, as a shard starts.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final

from rollout_svc.events import PauseFinished
from rollout_svc.sharding.split import ShardSettings
from tests.simulation.engine import SimEngine
from tests.simulation.invariants import Invariants
from tests.simulation.life import Gone, Life
from tests.simulation.pausing import check_report
from tests.simulation.shape import Shape
from tests.simulation.weather import befall
from tests.simulation.world import World

__all__ = ["Host", "ShardWorld"]

_LIVES: Final = 100  # numbers of lives that a shard may use
_STOP_S: Final = 12.0  # beyond the pause's deadline: margins of `stop`


class ShardWorld(World):
    """What is outside of one shard; what it says is said in the history's chronicle."""

    def __init__(self, hub: World, shard_id: str) -> None:
        super().__init__(f"{hub.seed}:{shard_id}", hub.loop, telling=hub.telling)
        self.hub = hub
        self.shard_id = shard_id
        self.tokens, self.verdicts, self.chronicle = hub.tokens, hub.verdicts, hub.chronicle

    def say(self, actor: str, what: str, *details: Any) -> None:
        """Say which shard it is."""
        if self.telling:
            self.chronicle.add(self.loop.time(), f"{self.shard_id}.{actor}", what, *map(str, details))

    def breaks(self, promise: str, how: str) -> None:
        """The history is broken."""
        self.hub.breaks(promise, f"{self.shard_id}: {how}")


class Host:
    """See the module's invariants.

    Attributes:
        life: of its service that is up, or was last.
        reachable: its service answers.
        killed_at: when a life of it ended, ever.
    """

    def __init__(self, hub: World, index: int, settings: ShardSettings, shape: Shape) -> None:
        self.shard_id = settings.shard_id
        self.settings = settings
        self.shape = shape
        self.world = ShardWorld(hub, settings.shard_id)
        self.invariants: list[Invariants] = []
        self.reachable = False
        self.killed_at: list[float] = []
        self._first = index * _LIVES + 1
        self._began: Invariants | None = None
        for number, url in enumerate(shape.urls):
            self.world.engines[url] = SimEngine(self.world, f"e{number}", url, shape.engine_batch)
        self.world.service_died = self._died
        self._returns: asyncio.Future[None] = hub.future()

    @property
    def life(self) -> Life:
        """Of its service."""
        return self.world.life

    @property
    def alive(self) -> bool:
        """Whether its service is up, and answers."""
        return self.reachable and self.life.up

    def after_turn(self) -> None:
        """Look at the standing checks."""
        if self._began is not None and self.life.up:
            self._began.after_turn()

    def begin(self) -> None:
        """Start the machine."""
        self.world.spawn(self._next_life(0.0))
        self.world.spawn(befall(self.world, lambda: self.world.faults.healed))

    def kill(self, why: str) -> None:
        """End its service as `kill -9` does."""
        if self.world.lives and self.life.up:
            self.life.crash(why)

    def _died(self) -> None:
        self.reachable, self._began = False, None
        self.killed_at.append(self.world.now)
        self.world.spawn(self._next_life(self.world.rng.uniform(0.05, 3.0)))

    async def _next_life(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            await self._begin_life()
        except Gone:
            return

    async def _begin_life(self) -> None:
        world = self.world
        life = Life(world, self.shape, self._first + len(world.lives), self.settings.portion)
        world.lives.append(life)
        world.faults.stands("running")
        checks = Invariants(life)
        self.invariants.append(checks)

        async def start() -> None:
            await life.service.start()
            self._began = checks
            checks.begin()
            life.witness.recall(life.parts.buffer)
            world.durable.check_recovered(life.parts)
            self.reachable = True
            await life.service.ready()

        def finished(_: PauseFinished) -> None:
            report = life.parts.pauses.last_report
            if report is not None:
                check_report(life, report, checks.lanes)

        life.bus.subscribe(PauseFinished, finished)
        await life.call("start", start)
        life.ready = True

    @property
    def quiet(self) -> bool:
        """Whether every prompt that reached it has its outcome."""
        if not (self.alive and self.life.ready):
            return False
        producer = self.life.parts.producer
        left = any(source.peek() is not None for source in producer._sources.values())
        return not left and not producer.tail.waiting_prompts and not self.life.parts.ledger.unsettled_groups

    async def stop(self) -> None:
        """Stop the service, and look whether anything is left."""
        world, life = self.world, self.life
        self.invariants[-1].recount()
        began = world.now
        await life.call("stop", life.service.stop)
        took, bound = world.now - began, life.config.pause.deadline_s + _STOP_S
        world.require(took <= bound, "P8", f"stop took {took:.3f} s")
        world.durable.check_ended()
        await asyncio.sleep(10.0)
        self.invariants[-1].watch.check_ended()
        left = [task.get_name() for task in world.loop.tasks_of(life.number)]
        world.require(not left, "P11", f"tasks outlive the service: {left}")
        for name, since, task in life.dropped:
            world.require(task.done(), "P14", f"{name}, which was left at {since:.3f}, still runs")

    def dice(self, name: str) -> Random:
        """Dice of its own."""
        return Random(f"{self.world.seed}:{name}")
