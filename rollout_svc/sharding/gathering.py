"""Waiting until the shards have a batch between them.

Invariants:

- Each shard in step is asked for its share first, so that its schedule makes that. Who has it gives what else it has,
  and is asked to make one more, only once the others lag, or can have no more: their prompts would else be used up
  unevenly.
- Who lags says at short intervals what it has: a batch is there as soon as the sum is, however it is dealt out.
- Whoever joins, or is lost, in the meantime counts, or counts no more, from then on.
- What cannot be is said at once: when no shard can ever have more, and it does not suffice.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rollout_svc.errors import NotNow, RolloutError
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members
from rollout_svc.sharding.shares import share_out
from rollout_svc.tasks import TaskOwner

__all__ = ["Gathering"]

_PATIENCE_S: Final = 1.0  # seconds before a shard that lags is made up for by the others
_PATIENCE_SHARE: Final = 0.1  # of the time, at most
_WAIT_SHARE: Final = 0.95  # of the time: what shards have has to be known before it is up
_LOOK_S: Final = 0.5  # seconds between what a shard that lags says of itself
_GRACE_S: Final = 1.0  # seconds a shard may take longer to answer than it was given to wait
_AGAIN_S: Final = 0.05  # seconds before one that had less than it was asked for is asked again


class Gathering:
    """One wait for one batch.

    Attributes:
        ready: groups that each shard has, as far as it said.
        final: what those said that can never have more.
    """

    def __init__(self, members: Members, tasks: TaskOwner, step: int, groups: int, until: float) -> None:
        self.ready: dict[str, int] = {}
        self.final: dict[str, NotNow] = {}
        self.wake = asyncio.Event()
        self._members = members
        self._tasks = tasks
        self._step = step
        self._groups = groups
        self._until = until
        self._asking: dict[str, asyncio.Task[None]] = {}
        now = asyncio.get_running_loop().time()
        self._patient_until = now + min(_PATIENCE_S, _PATIENCE_SHARE * max(0.0, until - now))
        self._timer = asyncio.get_running_loop().call_at(self._patient_until, self.wake.set)

    @property
    def enough(self) -> bool:
        """Whether a batch is there."""
        return sum(self.ready.values()) >= self._groups

    @property
    def hopeless(self) -> bool:
        """Whether it can never be, by what every shard has said; one that is out may return, and have some."""
        return not self._members.outside and all(shard in self.final for shard in self._members.by_id)

    def begin(self) -> None:
        """Ask whoever is in step and is not being asked."""
        inside = self._members.inside
        for shard in [shard for shard in self.ready if not self._members.by_id[shard].inside]:
            del self.ready[shard]
        shares = share_out(self._groups, {member.shard_id: self._groups for member in inside})
        lagging = bool(self.final) or asyncio.get_running_loop().time() >= self._patient_until
        for member in inside:
            shard = member.shard_id
            had = self.ready.get(shard)
            lacks = had is None or had < shares[shard]
            if shard not in self._asking and shard not in self.final and (lacks or lagging):
                asking = self._tasks.spawn(f"{shard}:ready", self._ask(member, max(1, shares[shard])), handled=True)
                self._asking[shard] = asking

    async def _share(self, member: Member, wanted: int) -> bool:
        """Ask for what a shard has to have; returns whether it has that."""
        now = asyncio.get_running_loop().time()
        heard_by = self._patient_until if now < self._patient_until else now + _LOOK_S
        wait_s = min((self._until - now) * _WAIT_SHARE, heard_by - now)
        return await self._say(member, min(wanted, self._groups), wait_s) >= wanted

    async def _more(self, member: Member, had: int) -> bool:
        """Look for what a shard has beyond its share; where there is none ask it for one more."""
        missing = self._groups - sum(self.ready.values())
        if await self._say(member, min(had + missing, self._groups), 0.0) > had:
            return True
        return await self._share(member, had + 1)

    async def _say(self, member: Member, wanted: int, wait_s: float) -> int:
        member.check_life()
        asked = member.shard.ready_groups(self._step, wanted, max(0.0, wait_s))
        self.ready[member.shard_id] = number = await member.ask("ready_groups", asked, self._until + _GRACE_S)
        return number

    async def _ask(self, member: Member, share: int) -> None:
        shard, had = member.shard_id, self.ready.get(member.shard_id, 0)
        try:
            if not await (self._share(member, share) if had < share else self._more(member, had)):
                self.wake.set()
                await asyncio.sleep(_AGAIN_S)
        except NotNow as error:
            detail: dict[str, Any] = error.detail if isinstance(error.detail, dict) else {}
            self.ready[shard] = detail.get("ready", 0)
            if detail.get("can_be_met") is False:
                self.final[shard] = error
            else:
                await asyncio.sleep(_AGAIN_S)
        except RolloutError:
            self.ready.pop(shard, None)
            await asyncio.sleep(_AGAIN_S)
        finally:
            self._asking.pop(shard, None)
            self.wake.set()

    def end(self) -> None:
        """Ask no more."""
        self._timer.cancel()
        for task in tuple(self._asking.values()):
            task.cancel()
