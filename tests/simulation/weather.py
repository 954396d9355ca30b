"""What befalls engines, and the service, while a history goes on.

Invariant: everything that lasts ends by itself, or when the history is healed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.engine import SimEngine
from tests.simulation.faults import ENGINE

if TYPE_CHECKING:
    from tests.simulation.history import History
    from tests.simulation.world import World

__all__ = ["befall", "doom"]


async def befall(world: World, over: Callable[[], bool]) -> None:
    """Let engines be slow, frozen, crashed."""
    rng = Random(f"{world.seed}:weather")
    while not over():
        await asyncio.sleep(rng.uniform(0.1, 2.5))
        name = world.faults.draw(ENGINE)
        engine = rng.choice(list(world.engines.values()))
        if name is None or not engine.up or engine.frozen or engine.refusing or engine.slowness != 1.0:
            continue
        world.say(engine.name, "has fault", name)
        _befall(world, rng, name, engine)


def _befall(world: World, rng: Random, name: str, engine: SimEngine) -> None:
    seconds = rng.choice((0.1, 1.0, 5.0)) * rng.uniform(0.5, 1.5)
    if name == "refused":
        engine.refusing = True

        def undo() -> None:
            engine.refusing = False
    elif name == "slow":
        engine.set_slowness(rng.choice((5.0, 50.0)))

        def undo() -> None:
            engine.set_slowness(1.0)
    elif name == "frozen":
        engine.freeze()

        def undo() -> None:
            if engine.frozen:
                engine.thaw()
    else:
        weights = 0 if name == "old_weights" else engine.weights
        engine.crash()

        def undo() -> None:
            if not engine.up:
                engine.come_back(weights)

        if name == "old_weights" and rng.random() < 0.5:
            seconds = 0.01  # so short that nobody need notice
    world.strike_for(name, seconds, undo)


def doom(history: History) -> None:
    """Choose when the service is killed: after so many turns, or when a climb gets to a rung."""
    world, rng = history.world, Random(f"{history.world.seed}:doom")
    if world.faults.draw(("service_crash",)) is None:
        return
    if rng.random() < 0.3:
        history.doom_turn = rng.randint(50, 2500)
    else:
        history.doom_at = rng.choice(("gate", "abort", "judges", "http", "tasks", "report", "paused"))
        history.doom_after = rng.randint(0, 4)
