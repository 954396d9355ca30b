"""A simulated filter: it keeps, drops, raises, talks nonsense, hangs, and takes no notice of being cancelled.

Invariants:

- What it said, and was heard saying, is known to the world: a group is kept or dropped for that and nothing else.
- It has dice of its own, so that a history with a filter draws the same faults as one without.
- Once the history is healed it keeps and drops, and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rollout_svc.filtering import GroupView
from tests.simulation.world import current

__all__ = ["FickleFilter"]

_DROPPED: Final = 0.15
_BAD: Final = (("raises", 0.05), ("nonsense", 0.05), ("hangs", 0.04), ("deaf", 0.04), ("slow", 0.1))


class FickleFilter:
    """Asked about whole groups."""

    async def keep(self, group: GroupView) -> Any:
        """Say what the dice say."""
        world = current()
        world.asked[group.group_id] = None
        roll = world.filter_rng.random()
        mood = "" if world.faults.healed else _mood(world.filter_rng.random())
        world.say("filter", "is asked", group.group_id[-6:], mood)
        if mood == "raises":
            raise ValueError("this filter raises")
        if mood == "nonsense":
            return {"keep": roll}
        if mood == "deaf":
            await _unmoved(world.filter_rng.uniform(0.5, 4.0))
        else:
            await world.at_most({"hangs": 3600.0, "slow": 1.0}.get(mood, 0.05) * world.filter_rng.random())
        verdict = "dull" if roll < _DROPPED else None
        world.asked[group.group_id] = verdict or "kept"
        return verdict


def _mood(roll: float) -> str:
    for mood, share in _BAD:
        if roll < share:
            return mood
        roll -= share
    return ""


async def _unmoved(seconds: float) -> None:
    """Wait, and take no notice of the first cancellation."""
    try:
        await current().at_most(seconds)
    except asyncio.CancelledError:
        await current().at_most(seconds)
