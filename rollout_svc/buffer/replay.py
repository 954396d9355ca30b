"""The replay buffer: unfinished groups that wait to go on, finished ones that wait for a trainer, and leases.

Invariants:

- A group is in at most one of: unfinished, ready, a lease. Each move is one synchronous step.
- A lease ends exactly once: by its ack (consumed for good) or by time (its groups are ready again, in front).
- Old work first: unfinished groups go on by their oldest token's version, then by their admission; ready ones are first
  in, first out, and what a lease gives back goes to the front.
- An unfinished group that is set aside is still unfinished, and goes on only when it is asked for by name.
- The bytes of finished groups, ready and leased, are counted exactly; nothing is ever put out to make room.
- The clock is passed in, and does not go back.
- What it is asked with every group costs the logarithm of what waits here, whoever rests and for how long.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rollout_svc.group import Group

__all__ = ["Lease", "ReplayBuffer"]

_REMEMBERED_LEASES = 1024  # ended leases whose fate is still told to a late ack


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch lent to a trainer until it acknowledges, or until `expires_at` (clock seconds)."""

    batch_id: str
    step: int
    groups: tuple[Group, ...]
    expires_at: float
    metrics: dict[str, Any] = field(default_factory=dict)


class ReplayBuffer:
    """All groups that no task owns and that are not settled."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """Make an empty buffer.

        Args:
            max_bytes: bytes of finished groups at which it is `full`; None: it never is.
        """
        self.max_bytes = max_bytes
        self.ready_bytes = 0
        self.leased_bytes = 0
        self.heavy_bytes = 0  # among them, of tensors, which lie where their store is
        self._unfinished: OrderedDict[str, Group] = OrderedDict()
        self._line: dict[str, int] = {}  # those that were not set aside, with the number of their last return
        self._due: list[tuple[float, float, int, Group]] = []  # a heap by age; what left the line is dropped late
        self._resting: list[tuple[float, int, Group]] = []  # likewise by the time until which they rest
        self._put = 0
        self._now = -inf  # of the last look
        self._ready: OrderedDict[str, Group] = OrderedDict()
        self._ages: Counter[tuple[float, float]] = Counter()  # ready groups by their oldest version and their weakest
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<ReplayBuffer unfinished={len(self._unfinished)} ready={len(self._ready)} leases={len(self._leases)}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` after every change that may let somebody go on: what only takes out tells nobody."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Tell the listeners that something moved."""
        for listener in self._listeners:
            listener()

    # -- unfinished ------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Groups that wait to go on."""
        return len(self._unfinished)

    def unfinished_groups(self) -> Iterator[Group]:
        """Those groups, in the order they came."""
        return iter(tuple(self._unfinished.values()))

    def put_back(self, group: Group) -> None:
        """Keep a group that was handed back unfinished."""
        self._unfinished[group.group_id] = group
        self._put += 1
        self._line[group.group_id] = self._put
        if group.not_before <= self._now:
            heapq.heappush(self._due, (group.oldest, group.created_at, self._put, group))
        else:
            heapq.heappush(self._resting, (group.not_before, self._put, group))
        self.changed()

    def next_unfinished(self, now: float) -> Group | None:
        """Take out the oldest group whose time has come; None when there is none."""
        if not self.due(now):
            return None
        group = heapq.heappop(self._due)[-1]
        self.take_out(group)
        return group

    def set_aside(self, group: Group) -> None:
        """Keep a group that was taken out, until it is asked for by name; tells nobody."""
        self._unfinished[group.group_id] = group
        self._line.pop(group.group_id, None)

    def take_out(self, group: Group) -> None:
        """Take this unfinished group out, also one that was set aside; whoever settles it calls `changed`."""
        del self._unfinished[group.group_id]
        self._line.pop(group.group_id, None)

    def due(self, now: float) -> bool:
        """Whether an unfinished group may go on; asked before every start, so it looks at none that rests."""
        self._now = now
        resting, due = self._resting, self._due
        while resting and (resting[0][0] <= now or not self._stands(resting[0])):
            entry = heapq.heappop(resting)
            if self._stands(entry):
                _, put, group = entry
                heapq.heappush(due, (group.oldest, group.created_at, put, group))
        while due and not self._stands(due[0]):
            heapq.heappop(due)
        return bool(due)

    def rests_until(self) -> float | None:
        """When the next of those that rested at the last look may go on; None when none did."""
        while self._resting and not self._stands(self._resting[0]):
            heapq.heappop(self._resting)
        return self._resting[0][0] if self._resting else None

    def _stands(self, entry: tuple[Any, ...]) -> bool:
        """Whether a group is in line as it was when it was entered."""
        put: int = entry[-2]
        return self._line.get(entry[-1].group_id) == put

    # -- bytes -----------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes of the encoded samples of finished groups, and of their routed experts."""
        return self.ready_bytes + self.leased_bytes

    @property
    def full(self) -> bool:
        """Whether those have reached the bound: what is begun may finish, nothing new should be."""
        return self.max_bytes is not None and self.bytes >= self.max_bytes

    def why_full(self, batch: int) -> str:
        """The bytes, and where the bound is below a batch of so many groups what that would take, by their mean."""
        told = f"buffer.max_bytes is {self.max_bytes}, finished groups take {self.bytes}"
        finished = self.ready + sum(len(lease.groups) for lease in self._leases.values())
        if self.max_bytes is None or batch * self.bytes <= self.max_bytes * finished:
            return told
        return f"{told}; a batch of {batch} groups would take about {batch * self.bytes // finished}"

    # -- ready -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Groups that wait for a trainer."""
        return len(self._ready)

    def ready_groups(self) -> Iterator[Group]:
        """Those groups, oldest first."""
        return iter(tuple(self._ready.values()))

    def ready_since(self, version: float, counting: float = -inf) -> int:
        """How many of them have no token older than `version`, nor one of an unknown version.

        Only those count of whose members each has a token of version `counting` or younger.
        """
        return sum(n for (oldest, weakest), n in self._ages.items() if oldest >= version and weakest >= counting)

    def put_ready(self, group: Group) -> None:
        """Keep a finished group."""
        self._enter(group)
        self.changed()

    def drop_ready(self, group: Group) -> None:
        """Take a finished group out; the caller settles it, then calls `changed`."""
        self._leave(group)

    def _enter(self, group: Group) -> None:
        self._ready[group.group_id] = group
        self._ages[group.oldest, group.weakest] += 1
        self.ready_bytes += group.payload_bytes
        self.heavy_bytes += group.heavy_bytes

    def _leave(self, group: Group) -> None:
        del self._ready[group.group_id]
        self.ready_bytes -= group.payload_bytes
        self.heavy_bytes -= group.heavy_bytes
        age = group.oldest, group.weakest
        self._ages[age] -= 1
        if not self._ages[age]:
            del self._ages[age]

    # -- leases ----------------------------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases in force."""
        return tuple(self._leases.values())

    def lease(
        self,
        batch_id: str,
        step: int,
        groups: list[Group],
        expires_at: float,
        metrics: dict[str, Any] | None = None,
    ) -> Lease:
        """Lend ready groups as one batch, with its figures."""
        for group in groups:
            self._leave(group)
            group.lease()
            self.leased_bytes += group.payload_bytes
            self.heavy_bytes += group.heavy_bytes
        lease = self._leases[batch_id] = Lease(batch_id, step, tuple(groups), expires_at, metrics or {})
        return lease

    def leased_at(self, step: int) -> Lease | None:
        """The lease of a step, if it is in force."""
        return next((lease for lease in self._leases.values() if lease.step == step), None)

    def acknowledge(self, batch_id: str) -> Lease | None:
        """Consume a leased batch for good; None when no such lease is in force."""
        lease = self._leases.pop(batch_id, None)
        if lease is None:
            return None
        for group in lease.groups:
            self.leased_bytes -= group.payload_bytes
            self.heavy_bytes -= group.heavy_bytes
            group.settle("consumed")
        self.remember(batch_id, "acknowledged")
        self.changed()
        return lease

    def expire_leases(self, now: float) -> list[Lease]:
        """End the leases whose time has passed; their groups are ready again, before all others."""
        return self._end([lease for lease in self._leases.values() if lease.expires_at <= now])

    def give_back(self, batch_id: str) -> list[Lease]:
        """End one lease before its time; returns it, where it was in force."""
        return self._end([self._leases[batch_id]] if batch_id in self._leases else [])

    def _end(self, expired: list[Lease]) -> list[Lease]:
        for lease in reversed(expired):  # each goes in front of what is there, so that the oldest ends up first
            del self._leases[lease.batch_id]
            for group in reversed(lease.groups):
                group.unlease()
                self.leased_bytes -= group.payload_bytes
                self.heavy_bytes -= group.heavy_bytes
                self._enter(group)
                self._ready.move_to_end(group.group_id, last=False)
            self.remember(lease.batch_id, "expired")
        if expired:
            self.changed()
        return expired

    def fate(self, batch_id: str) -> str | None:
        """How an ended lease ended: `acknowledged` or `expired`; None for one never seen, or long ago."""
        return self._ended.get(batch_id)

    def remember(self, batch_id: str, fate: str) -> None:
        """Keep how a lease ended, for a late ack."""
        self._ended[batch_id] = fate
        if len(self._ended) > _REMEMBERED_LEASES:
            self._ended.popitem(last=False)
