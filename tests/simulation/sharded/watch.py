"""What has to hold of a coordinator and its shards after every turn of the loop.

Invariants checked here: P1 (the sums balance), P8 P9 P11 (a pause's report against what the shards do), P24 (one
version in traffic).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rollout_svc.gate import LANES
from rollout_svc.ledger import SETTLED
from rollout_svc.pause.report import PauseReport
from tests.simulation.sharded.front import Front
from tests.simulation.sharded.host import Host

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Watch"]

_RECOUNT_TURNS: Final = 16
_ACCOUNTS: Final = ("queued", "in_flight", "aborted", "ready", "leased", *SETTLED)


class Watch:
    """The standing checks of one history.

    Attributes:
        pauses: reports that were looked at.
    """

    def __init__(self, world: World, hosts: Sequence[Host]) -> None:
        self.pauses = 0
        self._world = world
        self._hosts = hosts
        self._seen: PauseReport | None = None
        self._ticket = 0
        self._turns = 0

    def begin(self) -> None:
        """Another coordinator begins."""
        self._seen, self._ticket = None, 0

    def after_turn(self, front: Front) -> None:
        """Look at one that is up."""
        pauses = front.coordinator.pauses
        self._world.faults.stands(front.coordinator.state)
        if pauses.last_report is not self._seen:
            self._seen = pauses.last_report
            if self._seen is not None:
                self._check_report(front, self._seen)
        self._world.require(pauses.ticket >= self._ticket, "P11", f"ticket {pauses.ticket} after {self._ticket}")
        self._ticket = pauses.ticket
        self._turns += 1
        if self._turns % _RECOUNT_TURNS == 0:
            self._recount(front)

    def _check_report(self, front: Front, report: PauseReport) -> None:
        """Who is not named has stopped, and says of itself what the report says."""
        require, pauses = self._world.require, front.coordinator.pauses
        self.pauses += 1
        self._world.say("front", "paused", report.ticket, report.mode, report.clean, round(report.elapsed_s, 4))
        require(report.clean == (not report.abandoned), "P9", f"clean is {report.clean}: {report.abandoned}")
        require(report.ticket == pauses.ticket, "P11", f"the report of {report.ticket} comes at {pauses.ticket}")
        for host in self._hosts:
            sid = host.shard_id
            named = any((a.worker or "").partition(".")[0] == sid for a in report.abandoned)
            told = {name: tally for name, tally in report.workers.items() if name.startswith(f"{sid}.")}
            if named or not host.alive:
                continue
            gate, own = host.life.parts.gate, host.life.parts.pauses.last_report
            opened = [lane for lane in pauses.closed if gate.is_open(lane)]
            require(not opened, "P9", f"{sid} has {opened} open after the report, and is not named")
            died = bool(host.killed_at) and host.killed_at[-1] >= self._world.now - report.elapsed_s
            if own is not None and not died and front.coordinator.members.by_id[sid].inside:
                same = {f"{sid}.{name}": tally.in_flight for name, tally in own.workers.items()}
                said = {name: tally.in_flight for name, tally in told.items()}
                require(said == same, "P9", f"{sid} reported {same}, the whole report has {said}")
                parked = set(own.parked) - set(report.parked)
                require(not parked, "P9", f"{sid} reported {parked} as parked")
            if report.clean and report.mode != "keep":
                life = host.life
                calls = [c for w in life.parts.pool.workers.values() for c in w.calls.values()]
                left = [c for c in calls if c.lane in pauses.closed and c.cancelled_for is None]
                require(not left, "P9", f"{sid} has {left} under way after a clean report")

    def _recount(self, front: Front) -> None:
        require, coordinator = self._world.require, front.coordinator
        ledger = coordinator.members.ledger
        for unit in ("groups", "samples"):
            total = sum(ledger[unit][name] for name in _ACCOUNTS)
            require(ledger[unit]["admitted"] == total, "P1", f"{unit} do not balance: {ledger[unit]}")
        pauses, weights = coordinator.pauses, coordinator.weights
        for host, shard in zip(self._hosts, front.shards, strict=True):
            member = coordinator.members.by_id[host.shard_id]
            known = host.alive and shard.known == host.life.number
            if not (known and member.inside and member.life == shard.life):
                continue
            gate = host.life.parts.gate
            if pauses.state == "paused" and pauses.climbing is None:
                opened = [lane for lane in pauses.closed if gate.is_open(lane)]
                require(not opened, "P9", f"{host.shard_id} is in step, and has {opened} open while all is paused")
            if weights.updating is None and any(gate.is_open(lane) for lane in LANES):
                version = host.life.parts.fleet.version
                whole = weights.version
                require(version == whole, "P24", f"{host.shard_id} has {version}, all have {whole}")

    def check_ended(self, front: Front) -> None:
        """Everything is quiet: the sums are those of the journals."""
        ledger, require = front.coordinator.members.ledger["groups"], self._world.require
        for name in SETTLED:
            found = sum(host.world.durable.outcomes[name] for host in self._hosts)
            require(ledger[name] == found, "P1", f"{found} groups are {name}, the ledger has {ledger[name]}")
        require(
            all(not ledger[n] for n in _ACCOUNTS if n not in SETTLED), "P1", f"all is quiet, the ledger is {ledger}"
        )
