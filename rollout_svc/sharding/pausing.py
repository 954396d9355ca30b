"""One pause over all shards: its number, who joins it, and its report.

Invariants:

- The ticket is the coordinator's own. Whoever asks while one is under way joins
  it in every shard: the union of lanes, the earlier deadline, the stronger mode.
- A pause has returned by its deadline, whatever the shards do. One that did not acknowledge is out of step: named in
  the report, and paused again before it is let go on.
- What a shard in step refuses is refused: where the pause was a new one, the others go on. One that is out of step, or
  cannot be asked now (it is starting again, or has failed), refuses nothing: it has not acknowledged.
- Nobody joins a pause that is being undone: whoever asks then begins one, which has its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rollout_svc.config import PauseConfig
from rollout_svc.errors import NotNow, RolloutError
from rollout_svc.gate import LANES, Lane, Mode, stronger
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.request import Asked, read_terms
from rollout_svc.pause.standing import PauseState, Standing
from rollout_svc.sharding.member import Member
from rollout_svc.sharding.members import Members
from rollout_svc.sharding.protocol import ShardLost
from rollout_svc.sharding.reports import merge_reports
from rollout_svc.tasks import TaskOwner

__all__ = ["FannedPause"]

_TRAVEL_SHARE: Final = 0.05  # of a pause's time, kept for the way to the shards and back


@dataclass(eq=False)
class _Climb:
    """One pause under way.

    Attributes:
        asked: how often the shards were asked.
        counts: the first of these times that was for all that the pause has become: an answer to one before is no
            acknowledgement of what was asked later.
    """

    was: PauseState
    mode: Mode
    lanes: frozenset[Lane]
    kv: str
    offload: tuple[str, ...]
    started: float
    deadline: float
    asked: int = 0
    counts: int = 1
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    refused: RolloutError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, mode: Mode, lanes: frozenset[Lane], offload: tuple[str, ...], deadline: float) -> None:
        """Become what was asked for now as well; who acknowledged less than that has not acknowledged it."""
        before = self.mode, self.lanes, self.offload
        self.lanes |= lanes
        self.mode = mode if stronger(mode, self.mode) else self.mode
        self.offload = tuple(dict.fromkeys((*self.offload, *offload)))
        self.deadline = min(self.deadline, deadline)
        if (self.mode, self.lanes, self.offload) != before:
            self.counts = self.asked + 1
            self.reports.clear()


class FannedPause(Standing):
    """The pause protocol over all shards, and its state."""

    def __init__(self, members: Members, tasks: TaskOwner, config: PauseConfig) -> None:
        super().__init__()
        self._config = config
        self._members = members
        self._tasks = tasks
        self._climb: _Climb | None = None
        self._climbing: asyncio.Task[PauseReport] | None = None

    @property
    def climbing(self) -> asyncio.Task[PauseReport] | None:
        """The pause under way."""
        return self._climbing

    async def pause(self, asked: Asked) -> PauseReport:
        """Stop lanes in every shard; returns by the deadline with what was found.

        Raises:
            Conflict: `if_ticket` is not the current ticket, or a shard's state forbids it.
            BadRequest: it means nothing, or a shard's engines cannot do it.
        """
        terms = read_terms(asked, self._config, ())  # what its engines can do every shard says itself
        mode, wanted, offload, climb = terms.mode, frozenset(terms.lanes), tuple(asked.offload), self._climb
        self.check_pause(asked.if_ticket)
        self.asked += 1
        now = asyncio.get_running_loop().time()
        deadline = now + terms.deadline_s
        if climb is not None:
            climb.join(mode, wanted, offload, deadline)
            self._close(climb.lanes, climb.mode)
            self._send(climb)
            climb.wake.set()
        elif self.last_report and not offload and not self.weaker(mode, wanted):
            return self.last_report
        else:
            climb = self._climb = _Climb(self.state, mode, wanted, terms.cache, offload, now, deadline)
            self._begin(wanted, mode)
            self._send(climb)
            self._climbing = self._tasks.spawn(f"pause:{self.ticket}", self._run(climb), handled=True)
            self._climbing.add_done_callback(lambda task: task.cancelled() or task.exception())
        climbing = self._climbing
        assert climbing is not None  # noqa: S101 - there is one exactly while there is a climb
        return await asyncio.shield(climbing)

    async def settled(self) -> None:
        """Wait until no pause is under way."""
        while self._climbing is not None:
            await asyncio.wait({self._climbing})

    def let_go(self) -> None:
        """Nothing is asked to be closed any more; the caller has every shard open."""
        self._open()

    def _send(self, climb: _Climb) -> None:
        """Ask every shard for what the pause has become; those that are out of step as well: they may be at work."""
        climb.asked += 1
        now = asyncio.get_running_loop().time()
        given = {
            "mode": climb.mode,
            "deadline_s": max(1e-3, (climb.deadline - now) * (1 - _TRAVEL_SHARE)),
            "lanes": [lane for lane in LANES if lane in climb.lanes],
            "kv": climb.kv,
            "offload": list(climb.offload),
        }
        for member in self._members.all:
            self._tasks.spawn(f"{member.shard_id}:pause", self._one(climb, climb.asked, member, given))

    async def _one(self, climb: _Climb, asked: int, member: Member, given: Mapping[str, Any]) -> None:
        life = member.shard.life
        try:
            report = await member.pause(given, climb.deadline)
        except ShardLost:
            pass
        except RolloutError as error:
            if isinstance(error, NotNow) or not member.inside:
                member.fall(member.why or str(error))
            else:
                climb.refused = climb.refused or error
        else:
            if asked >= climb.counts and member.shard.life == life:
                climb.reports[member.shard_id] = report
        climb.ended[member.shard_id] = asked
        climb.wake.set()

    async def _run(self, climb: _Climb) -> PauseReport:
        loop = asyncio.get_running_loop()
        try:
            while climb.refused is None and not self._over(climb) and loop.time() < climb.deadline:
                climb.wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(climb.deadline):
                        await climb.wake.wait()
            if climb.refused is not None and climb.was == "running":
                await self._undo(climb)
                raise climb.refused
            report = self._report(climb)
        finally:
            if self._climb is climb:
                self._climb = None
                self._end()
            if self._climbing is asyncio.current_task():
                self._climbing = None
        self._returned(report)
        return report

    def _over(self, climb: _Climb) -> bool:
        """Whether every shard has said what it has to say of the last that was asked."""
        return all(climb.ended.get(shard) == climb.asked for shard in self._members.by_id)

    def _report(self, climb: _Climb) -> PauseReport:
        now = asyncio.get_running_loop().time()
        missing = [member for member in self._members.all if member.shard_id not in climb.reports]
        silent = {member.shard_id: member.silence(now) for member in missing}
        for member in missing:
            member.fall(member.why or f"shard {member.shard_id} did not acknowledge pause {self.ticket}")
        reports = {name: climb.reports[name] for name in self._members.by_id if name in climb.reports}
        return merge_reports(self.ticket, climb.mode, now - climb.started, reports, silent, self._members.ledger)

    async def _undo(self, climb: _Climb) -> None:
        """Nobody is to be stopped by a pause that was refused."""
        self.let_go()
        self._climb = None  # whoever asks from now on is not to be undone with it
        self._end()
        for member in self._members.inside:
            if member.shard_id not in climb.reports:
                member.fall(f"pause {self.ticket} was refused while shard {member.shard_id} climbed")
        await self._members.fan(self._members.inside, lambda member: member.open(climb.deadline))
