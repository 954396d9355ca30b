"""What befalls shards and their coordinator at moments of its own: they are killed, or hear nothing for a while.

Invariant: everything that lasts ends by itself, or when the history is healed.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.sharded.history import ShardedHistory

__all__ = ["befall_shards"]


async def befall_shards(history: ShardedHistory) -> None:
    """Kill, and silence."""
    world, rng = history.world, Random(f"{history.world.seed}:fates")
    while not world.faults.healed:
        await asyncio.sleep(rng.uniform(0.2, 2.0))
        name = world.faults.draw(("shard_at_once", "shard_hushed", "coordinator_at_once"))
        if name is None:
            continue
        index = rng.randrange(len(history.hosts))
        delay = rng.choice((0.0, 0.05, 0.5)) * rng.random()
        if rng.random() < 0.5:
            await _wait_for(history, rng.choice(("pausing", "paused", "resuming")))
        await asyncio.sleep(delay)
        if history.world.faults.healed:
            break
        world.faults.once(name)
        world.say("world", name, history.hosts[index].shard_id)
        if name == "coordinator_at_once":
            history.front.kill(name)
        elif name == "shard_at_once":
            history.hosts[index].kill(name)
        else:
            history.front.shards[index].hush(rng.choice((0.3, 2.0, 8.0)) * rng.uniform(0.5, 1.5))


async def _wait_for(history: ShardedHistory, stand: str) -> None:
    """Until the coordinator stands there, or 2 s."""
    until = history.world.now + 2.0
    while history.world.faults.stand != stand and history.world.now < until:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.005)
