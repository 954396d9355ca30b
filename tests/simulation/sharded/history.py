"""One sharded history: a seed, its shards, their coordinator, and who uses it, to the last group's outcome.

Invariants:

- Every history ends healed, resumed and quiet: each prompt has its outcome within `_QUIET_S` virtual seconds, and
  coordinator and shards stop leaving nothing behind.
- The first broken promise ends it; it is printed with everything that came before.
"""

from __future__ import annotations

import asyncio
import gc
from random import Random
from typing import Final

from rollout_svc.errors import ServiceError
from tests.simulation.calls import Gone
from tests.simulation.history import Outcome
from tests.simulation.loop import SimLoop
from tests.simulation.sharded.actors import evaluate, feed, operate, train
from tests.simulation.sharded.calls import resume
from tests.simulation.sharded.fates import befall_shards
from tests.simulation.sharded.faults import sharded_faults
from tests.simulation.sharded.front import Front
from tests.simulation.sharded.handed import HandedOver
from tests.simulation.sharded.host import Host
from tests.simulation.sharded.shape import ShardedShape, draw_sharded
from tests.simulation.sharded.watch import Watch
from tests.simulation.world import Broken, World
from tests.support.memory_notes import MemoryNotes

__all__ = ["ShardedHistory", "run_sharded"]

_LIVELY_S: Final = 10.0  # virtual seconds of trouble before everything is healed
_QUIET_S: Final = 300.0  # virtual seconds in which a healed service has to bring every prompt to its outcome
_FRONTS: Final = 900  # number of the first coordinator's life
_STOP_S: Final = 6.0  # beyond the pause's deadline, for a coordinator to stop


class ShardedHistory:
    """A running history.

    Attributes:
        over: nobody is to use it any more.
        fed: every prompt was pushed.
    """

    def __init__(self, seed: int, *, adversarial: bool = False, telling: bool = True) -> None:
        shuffle = Random(f"{seed}:shuffle") if adversarial else None
        self.loop = SimLoop(after_turn=self._after_turn, shuffle=shuffle)
        self.world = World(seed, self.loop, telling=telling)
        self.world.faults = sharded_faults(seed)
        self.shape: ShardedShape = draw_sharded(seed)
        parts = zip(self.shape.parts, self.shape.shapes, strict=True)
        self.hosts = [Host(self.world, index, *both) for index, both in enumerate(parts)]
        self.notes = MemoryNotes(len(self.hosts))
        self.handed = HandedOver(self.world, self.shape, self.hosts)
        self.watch = Watch(self.world, self.hosts)
        self.fronts: list[Front] = []
        self.over = self.fed = False
        self._rng = Random(f"{seed}:fronts")
        self._up = asyncio.Event()

    @property
    def front(self) -> Front:
        """The coordinator as it is now."""
        return self.fronts[-1]

    async def front_up(self) -> Front:
        """Wait until there is a coordinator."""
        await self._up.wait()
        return self.front

    def leaves_now(self) -> bool:
        """Whether a caller is to leave before it is answered."""
        name = self.world.faults.draw(("caller_cancelled",))
        if name is not None:
            self.world.faults.once(name)
        return name is not None

    def _after_turn(self) -> None:
        world, loop = self.world, self.loop
        for host in self.hosts:
            host.after_turn()
        if self.fronts and self.front.up and self.front.made:
            self.watch.after_turn(self.front)
        if loop.broken is not None and world.broken is None:
            world.breaks("loop", repr(loop.broken))
        if world.broken is not None:
            raise world.broken

    async def _begin_front(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        front = Front(self.world, self.shape, self.hosts, self.notes, _FRONTS + len(self.fronts), self._front_died)
        self.fronts.append(front)
        self.watch.begin()
        self.world.say("front", "begins", front.number)
        try:
            starting = self.world.spawn(front.call("start", front.start))
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            while front.up and not front.made:  # noqa: ASYNC110 - where wake-ups are shuffled it takes more turns
                await asyncio.sleep(0.0)
            if front.up:
                self._up.set()
            await starting
        except Gone:
            return

    def _front_died(self) -> None:
        self._up.clear()
        if self._rng.random() < 0.5:  # as where shards are its own processes
            for host in self.hosts:
                host.kill("coordinator died")
        self.world.spawn(self._begin_front(self._rng.uniform(0.05, 2.0)))

    # -- the story -------------------------------------------------------------------------------------------

    async def tell(self) -> None:
        """Run the history."""
        world = self.world
        for host in self.hosts:
            host.begin()
        world.spawn(self._begin_front(0.0))
        actors = [world.spawn(work(self)) for work in (feed, train, operate, evaluate, befall_shards)]
        await asyncio.sleep(_LIVELY_S)
        world.heal()
        for host in self.hosts:
            host.world.heal()
        await self._quiet()
        self.over = True
        done, _ = await asyncio.wait(actors, timeout=120.0)
        for actor in done:
            actor.result()
        world.require(len(done) == len(actors), "hang", f"actors still wait: {actors}")
        await self._stop()

    async def _quiet(self) -> None:
        """Wait until every prompt has its outcome."""
        world, began = self.world, self.world.now
        while world.now - began < _QUIET_S:
            await asyncio.sleep(0.25)
            if not self._up.is_set():
                continue
            if self.front.coordinator.pauses.state == "paused" and world.now - began > 20.0:
                try:
                    await resume(self.front)
                except Gone:
                    continue
            if self.fed and all(host.quiet for host in self.hosts):
                return
        held = [repr(group) for host in self.hosts for group in host.invariants[-1].groups()]
        members = [repr(member) for member in self.front.coordinator.members.all]
        told = f"{self.front.coordinator.state} {members} {held}"
        world.breaks("hang", f"not quiet {_QUIET_S:g} s after everything was healed: {told}")
        await asyncio.sleep(1.0)

    async def _stop(self) -> None:
        world, front = self.world, self.front
        await front.call("status", front.coordinator.status)
        self.watch.check_ended(front)
        self.handed.check_ended()
        began, bound = world.now, self.shape.config.pause.deadline_s + _STOP_S
        await front.call("stop", front.coordinator.stop)
        took = world.now - began
        world.require(took <= bound, "P8", f"stop took {took:.3f} s")
        await asyncio.gather(*(host.stop() for host in self.hosts))
        left = [task.get_name() for task in self.loop.tasks_of(front.number)]
        world.require(not left, "P11", f"tasks outlive the coordinator: {left}")
        for name, since, task in front.dropped:
            world.require(task.done(), "P14", f"{name}, which was left at {since:.3f}, still runs")

    def end(self) -> None:
        """Close what is left, so that nothing of this history is met in the next one."""
        asyncio._set_running_loop(self.loop)
        try:
            self.loop.bury()
        finally:
            asyncio._set_running_loop(None)
        self.loop.close()


def run_sharded(seed: int, *, adversarial: bool = False, keep: bool = False, digest: bool = False) -> Outcome:
    """Run one seed; never raises for what the service does. See `run_history`."""
    collecting = gc.isenabled()
    gc.disable()
    history = ShardedHistory(seed, adversarial=adversarial, telling=keep or digest)
    world, outcome = history.world, Outcome(seed)
    try:
        asyncio._set_running_loop(None)
        history.loop.run_until_complete(history.loop.create_task(history.tell()))
    except Broken as broken:
        outcome.broken = str(broken)
    except (ServiceError, RuntimeError, AssertionError, asyncio.CancelledError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    finally:
        if collecting:
            gc.enable()
    outcome.turns, outcome.seconds = history.loop.turns, history.loop.time()
    outcome.met = world.faults.met
    outcome.admitted = sum(checks.admitted for host in history.hosts for checks in host.invariants)
    outcome.pauses = history.watch.pauses
    world.say("world", "ends", outcome.turns, outcome.admitted, outcome.pauses)
    outcome.digest = world.chronicle.digest() if digest else ""
    if keep:
        outcome.lines = list(world.chronicle.lines())
    history.end()
    return outcome
