"""One history: a seed, a world, and the service in it, from the start to the last group's outcome.

Invariants:

- Every history ends healed, resumed and quiet: each group has an outcome within `_QUIET_S` virtual seconds, and the
  service stops leaving nothing behind but what clings to life by itself.
- The first broken promise ends it; it is printed with everything that came before.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from rollout_svc.errors import ServiceError
from rollout_svc.events import PauseFinished
from tests.simulation.actors import evaluate, operate, train
from tests.simulation.engine import SimEngine
from tests.simulation.faults import ROUTED
from tests.simulation.invariants import Invariants
from tests.simulation.life import Gone, Life
from tests.simulation.loop import SimLoop
from tests.simulation.pausing import check_report, resume
from tests.simulation.shape import Shape, draw_shape
from tests.simulation.weather import befall, doom
from tests.simulation.world import Broken, World

__all__ = ["History", "Outcome", "run_history"]

_LIVELY_S: Final = 4.0  # virtual seconds of trouble before everything is healed
_QUIET_S: Final = 300.0  # virtual seconds in which a healed service has to bring every group to its outcome
_STOP_S: Final = 12.0  # beyond the pause's deadline: margins of `stop`


@dataclass
class Outcome:
    """What a history came to."""

    seed: int
    broken: str | None = None
    lines: list[str] = field(default_factory=list)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    digest: str = ""
    turns: int = 0
    admitted: int = 0
    pauses: int = 0
    seconds: float = 0.0


class History:
    """A running history."""

    def __init__(self, seed: int, *, adversarial: bool = False, telling: bool = True) -> None:
        shuffle = Random(f"{seed}:shuffle") if adversarial else None
        self.loop = SimLoop(after_turn=self._after_turn, shuffle=shuffle)
        self.world = World(seed, self.loop, telling=telling)
        self.shape: Shape = draw_shape(seed)
        if self.shape.config.experts.enabled:
            self.world.faults.also(ROUTED, Random(f"{seed}:rows faults"))
        self.over = False
        self.alive = asyncio.Event()
        self.doom_turn = 0
        self.doom_at = ""
        self.doom_after = 0
        self.invariants: list[Invariants] = []
        for index, url in enumerate(self.shape.urls):
            self.world.engines[url] = SimEngine(
                self.world, f"e{index}", url, self.shape.engine_batch, routed=self.shape.config.experts.enabled
            )
        self.world.service_died = self._restart
        self._live: Invariants | None = None
        self._pushes: dict[str, list[list[dict[str, Any]]]] = {}

    # -- turns -----------------------------------------------------------------------------------------------

    def _after_turn(self) -> None:
        world, loop = self.world, self.loop
        if self._live is not None and self._live._life.up:
            self._live.after_turn()
            self._meet_doom()
        if loop.broken is not None and world.broken is None:
            world.breaks("loop", repr(loop.broken))
        if world.broken is not None:
            raise world.broken

    def _meet_doom(self) -> None:
        faults = self.world.faults
        if faults.healed or not (self.doom_turn or self.doom_at) or not self.world.life.ready:
            return
        if self.doom_at and faults.stand == self.doom_at:
            self.doom_turn, self.doom_at = self.loop.turns + self.doom_after, ""
        if self.doom_turn and self.loop.turns >= self.doom_turn:
            self.doom_turn, self.doom_at = 0, ""
            faults.once("service_crash")
            self.world.life.crash("service_crash")

    # -- lives -----------------------------------------------------------------------------------------------

    async def _begin_life(self) -> None:
        world = self.world
        life = Life(world, self.shape, len(world.lives) + 1)
        world.lives.append(life)
        world.faults.stands("running")
        checks = Invariants(life)
        self.invariants.append(checks)

        async def start() -> None:
            await life.service.start()
            self._live = checks
            checks.begin()
            if self.shape.journalled:
                life.witness.recall(life.parts.buffer)
                world.durable.check_recovered(life.parts)
            for name in self.shape.tasks:
                for lines in self._prompts(name, life.number):
                    await self._push(life, name, lines)
            await life.service.ready()

        def finished(_: PauseFinished) -> None:
            report = life.parts.pauses.last_report
            if report is not None:
                check_report(life, report, checks.lanes)

        life.bus.subscribe(PauseFinished, finished)
        await life.call("start", start)
        life.ready = True
        self.alive.set()

    async def _push(self, life: Life, task: str, lines: list[dict[str, Any]]) -> None:
        """Push what may have been pushed before: what a journal has of it is known, the rest is new, once."""
        pushed = self.world.durable.pushed
        new = [line for line in lines if (task, line["id"]) not in pushed]
        answer = await life.service.put_prompts(task, lines)
        self.world.require(answer["accepted"] == len(new), "P31", f"{answer} of {len(new)} new prompts, {len(lines)}")
        if self.shape.journalled:
            durable = all((task, line["id"]) in pushed for line in lines)
            self.world.require(durable, "P31", f"a push of {task} was answered before it was durable")

    def _prompts(self, task: str, life: int) -> list[list[dict[str, Any]]]:
        """What is pushed in a life: all that was before, for a trainer cannot know what got through, and some more."""
        before = sum(checks.admitted for checks in self.invariants)
        count = max(6, self.shape.prompts - before) // len(self.shape.tasks) + 1
        new = [{"id": f"{task}{life}.{n}", "input_ids": [10 + n, 3, life]} for n in range(count)]
        earlier = self._pushes.setdefault(task, [])
        earlier.append(new)
        return list(earlier) if self.shape.journalled else [new]

    def _restart(self) -> None:
        self.alive.clear()
        self._live = None
        self.world.spawn(self._next_life())

    async def _next_life(self) -> None:
        await asyncio.sleep(self.world.rng.uniform(0.05, 3.0))
        try:
            await self._begin_life()
        except Gone:
            return

    # -- the story -------------------------------------------------------------------------------------------

    async def tell(self) -> None:
        """Run the history."""
        world = self.world
        doom(self)
        actors = []
        world.spawn(self._next_life_at_once())
        await self.alive.wait()
        actors += [world.spawn(train(self, number)) for number in range(self.shape.trainers)]
        actors += [world.spawn(work) for work in (operate(self), evaluate(self), befall(world, lambda: self.over))]
        await asyncio.sleep(_LIVELY_S)
        world.heal()
        await self._quiet()
        self.over = True
        done, _ = await asyncio.wait(actors, timeout=30.0)
        for actor in done:
            actor.result()
        world.require(len(done) == len(actors), "hang", f"actors still wait: {actors}")
        await self._stop()

    def end(self) -> None:
        """Close what is left, so that nothing of this history is met in the next one."""
        asyncio._set_running_loop(self.loop)
        try:
            self.loop.bury()
        finally:
            asyncio._set_running_loop(None)
        self.loop.close()

    async def _next_life_at_once(self) -> None:
        try:
            await self._begin_life()
        except Gone:
            return

    async def _quiet(self) -> None:
        """Wait until every group has its outcome."""
        world, began = self.world, self.world.now
        while world.now - began < _QUIET_S:
            await asyncio.sleep(0.25)
            life = world.life
            if not life.ready:
                continue
            if life.parts.pauses.state == "paused" and world.now - began > 20.0:
                try:
                    await resume(life)
                except Gone:
                    continue
            producer = life.parts.producer
            left = any(source.peek() is not None for source in producer._sources.values())
            if not left and not producer.tail.waiting_prompts and not life.parts.ledger.unsettled_groups:
                return
        held = [repr(group) for group in self.invariants[-1].groups()]
        world.breaks(
            "hang", f"not quiet {_QUIET_S:g} s after everything was healed: {held} {world.life.service.status()}"
        )

    async def _stop(self) -> None:
        world, life = self.world, self.world.life
        self.invariants[-1].recount()
        evaluations = life.parts.evaluations
        world.require(not evaluations.ledger.unsettled_groups, "hang", f"evaluations are left: {evaluations}")
        began = world.now
        await life.call("stop", life.service.stop)
        if self.shape.journalled:
            world.durable.check_ended()
        took, bound = world.now - began, life.config.pause.deadline_s + _STOP_S
        world.require(took <= bound, "P8", f"stop took {took:.3f} s")
        await asyncio.sleep(10.0)
        self.invariants[-1].watch.check_ended()
        left = [task.get_name() for task in self.loop.tasks_of(life.number)]
        world.require(not left, "P11", f"tasks outlive the service: {left}")
        for name, since, task in life.dropped:
            world.require(task.done(), "P14", f"{name}, which was left at {since:.3f}, still runs")


def run_history(seed: int, *, adversarial: bool = False, keep: bool = False, digest: bool = False) -> Outcome:
    """Run one seed; never raises for what the service does.

    Args:
        seed: of everything.
        adversarial: shuffle wake-ups as well.
        keep: write the history out.
        digest: calculate its digest.
    """
    collecting = gc.isenabled()
    gc.disable()
    history = History(seed, adversarial=adversarial, telling=keep or digest)
    world, outcome = history.world, Outcome(seed)
    try:
        asyncio._set_running_loop(None)
        main = history.loop.create_task(history.tell())
        history.loop.run_until_complete(main)
    except Broken as broken:
        outcome.broken = str(broken)
    except (ServiceError, RuntimeError, AssertionError, asyncio.CancelledError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    finally:
        if collecting:
            gc.enable()
    outcome.turns, outcome.seconds = history.loop.turns, history.loop.time()
    outcome.met = world.faults.met
    outcome.admitted = sum(checks.admitted for checks in history.invariants)
    outcome.pauses = sum(checks.pauses for checks in history.invariants)
    world.say("world", "ends", outcome.turns, outcome.admitted, outcome.pauses)
    outcome.digest = world.chronicle.digest() if digest else ""
    if keep:
        outcome.lines = list(world.chronicle.lines())
    history.end()
    return outcome
