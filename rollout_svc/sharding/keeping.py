"""Who is out of step is brought back.

Invariants:

- A shard opens only when it was held in this life, has paid what it owes, and has the fleet's weights; and only while
  nobody has asked for a pause. Where somebody has, it is in step once it is held so, and opens as the others do.
- Every shard is looked at every `_LOOK_S` seconds: one that was lost in between is found, whoever asks it for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from rollout_svc.errors import ConfigError, RolloutError
from rollout_svc.gate import LANES
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.pausing import FannedPause
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.updating import FannedWeights

__all__ = ["Keeper"]

_LOOK_S: Final = 1.0  # seconds between two looks at a shard
_ANSWER_S: Final = 5.0  # seconds a shard has to say how it stands


class Keeper:
    """Looks after the shards; see the module's invariants."""

    def __init__(
        self,
        pauses: FannedPause,
        weights: FannedWeights,
        deadline_s: float,
        returned: Callable[[Member, dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Make it.

        Args:
            pauses: what is asked for.
            weights: what a shard must have.
            deadline_s: of the pause that holds one.
            returned: is told of a shard that is held, with its status, before it may open: what it owes is paid.
        """
        self._pauses = pauses
        self._weights = weights
        self._deadline_s = deadline_s
        self._returned = returned

    async def keep(self, member: Member) -> None:
        """Look after one shard, for good."""
        while True:
            member.wake.clear()
            try:
                await (self.look(member) if member.inside else self.bring_in(member))
            except ShardLost:
                pass  # it said so itself
            except ConfigError as error:
                member.refuse(error)
            except RolloutError as error:
                member.fall(str(error), error.again_in_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await member.wake.wait()
            if not member.inside:
                await asyncio.sleep(_LOOK_S / 4)  # one that falls again at once is not to keep us busy

    async def look(self, member: Member) -> None:
        """See that a shard in step still is."""
        member.check_life()
        quiet = (self._pauses.state, self._pauses.asked)
        status = await member.call("status", {}, _now() + _ANSWER_S)
        member.check_life()
        member.hear(status)
        if (self._pauses.state, self._pauses.asked) != quiet or self._weights.updating is not None:
            return  # it was on its way
        wrong = {"running": ("paused", "pausing"), "paused": ("running",)}.get(quiet[0], ())
        if status["state"] in ("failed", "stopping", *wrong) and not member.opening:
            member.fall(f"it is {status['state']}, and the stage is {quiet[0]}")

    async def bring_in(self, member: Member) -> None:
        """Hold a shard, pay what it owes, give it the fleet's weights, and have it go on with the others."""
        life = member.shard.life
        status = await member.call("status", {}, _now() + _ANSWER_S)
        member.hear(status)
        if status["state"] in ("starting", "stopping", "failed"):
            member.fall(f"shard {member.shard_id} is {status['state']}")
            return
        given = {"mode": "abort", "deadline_s": self._deadline_s, "lanes": list(LANES)}
        await member.pause(given, _now() + self._deadline_s + _ANSWER_S)
        member.hear(status := await member.call("status", {}, _now() + _ANSWER_S))
        await self._returned(member, status)
        while self._weights.updating is not None:  # it is left out of that one, and given those weights after it
            await asyncio.wait({self._weights.updating})
        version = self._weights.version
        await self._weights.bring(member)
        if self._weights.version != version or self._weights.updating is not None or member.shard.life != life:
            member.wake.set()  # from the beginning: what it was given is not what it needs
            return
        if self._pauses.state == "running":
            asked = self._pauses.asked
            await member.open(_now() + self._deadline_s)
            if self._pauses.asked == asked and member.shard.life == life:
                member.enter(life)
            else:
                member.wake.set()
        elif self._pauses.state == "paused" and self._pauses.climbing is None:
            member.enter(life)  # it is opened with the others
        else:
            member.wake.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
