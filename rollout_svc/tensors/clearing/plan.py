"""Who is still owed what by a clear: a plan that does no I/O and is told the time.

Invariants (P29):

- Every id of a clear goes to every process that is a member while the clear is open, also to one that joins during it.
- A duty that was not done when its clear ends is kept, and is part of the next clear. Not done there either, it is
  given up: returned by name, and never sent again. So no id is kept for more than one clear after its own.
- A process that returned (another incarnation) has nothing of what it was owed before: that is dropped, neither sent
  nor given up. One that left is not asked to drain any more; whether it goes on as an owner is another matter.
- An order whose process returned while it was out is sent anew: what its predecessor answered ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

__all__ = ["EVERYTHING", "Ending", "Failure", "Order", "Plan", "Verb"]

Verb = Literal["drain", "drop", "flush"]
"""`drain`: let go of what you fetched; `drop`: of what you own; `flush`: of all you fetched."""

EVERYTHING: Final = ("*",)
"""What a `flush` is owed instead of ids."""


class Order(NamedTuple):
    """One request to be sent now.

    Attributes:
        process: address of whom.
        verb: what it shall do.
        ids: with which shards.
        attempt: 1, 2, …
        until: when it is to be given up, on the plan's clock.
        serial: tells it from every other order of the plan.
    """

    process: str
    verb: Verb
    ids: tuple[str, ...]
    attempt: int
    until: float
    serial: int


class Failure(NamedTuple):
    """What a process was owed and did not do: how many ids, and what was seen last."""

    process: str
    verb: Verb
    ids: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        what = "all it fetched" if self.ids == EVERYTHING else f"{len(self.ids)} ids"
        return f"{self.process} did not {self.verb} {what}: {self.why}"


class Ending(NamedTuple):
    """What is left of a clear when it ends.

    Attributes:
        kept: failed for the first time; sent again with the next clear.
        given_up: failed there too.
    """

    kept: tuple[Failure, ...]
    given_up: tuple[Failure, ...]


@dataclass(slots=True)
class _Duty:
    """What one process is owed in the open clear, under one verb."""

    old: tuple[str, ...]
    """Kept by the clear before."""
    new: tuple[str, ...]
    attempts: int = 0
    not_before: float = 0.0
    under_way: int | None = None
    """Serial of the order that is out."""
    why: str = "no answer in time"


@dataclass(slots=True)
class Plan:
    """The duties of one clear after the other.

    Args:
        attempts: of a duty within one clear, at least 1.
        pause_s: before the second attempt; doubled before each further one.
    """

    attempts: int = 3
    pause_s: float = 0.05
    _members: dict[str, str | None] = field(default_factory=dict)
    _kept: dict[tuple[str, Verb], tuple[str, ...]] = field(default_factory=dict)
    _open: dict[tuple[str, Verb], _Duty] = field(default_factory=dict)
    _running: bool = False
    _fresh: tuple[Verb, tuple[str, ...]] = ("drain", ())
    _deadline: float = 0.0
    _serial: int = 0

    @property
    def members(self) -> Mapping[str, str | None]:
        """Processes that may have fetched a shard, by address, each with its incarnation; None: not known yet."""
        return self._members

    @property
    def kept(self) -> int:
        """Ids that are kept for the next clear, one for each process and verb they are owed under."""
        return sum(map(len, self._kept.values()))

    def join(self, process: str, incarnation: str | None) -> int:
        """Take in a process, or take note that it returned.

        Args:
            process: its address.
            incarnation: which of the processes at that address; None: not known.

        Returns:
            How many ids it is no longer owed, because the process that was owed them has ended.
        """
        new = process not in self._members
        before = self._members.get(process)
        self._members[process] = incarnation or before
        forgotten = 0
        if incarnation is not None and before != incarnation:
            new = new or before is not None
            forgotten = self._forget(process) if before is not None else 0
            for key in [key for key in self._open if key[0] == process]:  # whoever was asked may be another one
                self._open[key] = _Duty(self._open[key].old, self._open[key].new)
        verb, ids = self._fresh
        if new and self._running and ids and (process, verb) not in self._open:
            self._open[process, verb] = _Duty((), ids)
        return forgotten

    def leave(self, process: str) -> int:
        """Let a process go; returns how many ids it is no longer owed. What it shall drop as an owner stays."""
        self._members.pop(process, None)
        fetched = [key for key in (*self._kept, *self._open) if key[0] == process and key[1] != "drop"]
        forgotten = sum(len(self._kept.pop(key, ())) for key in fetched)
        for duty in [self._open.pop(key) for key in fetched if key in self._open]:
            forgotten += len(duty.old) + len(duty.new)
        return forgotten

    def begin(
        self, verb: Verb, ids: Iterable[str], *, drops: Mapping[str, tuple[str, ...]], now: float, deadline: float
    ) -> None:
        """Open a clear.

        Args:
            verb: what every member is asked to do: `drain` or `flush`.
            ids: with which shards.
            drops: by address of each storage owner, the ids it shall drop. It is asked to do `verb` as well.
            now: seconds on the plan's clock.
            deadline: of the whole clear, on the same clock.
        """
        if self._running:
            raise RuntimeError("one clear at a time: end the one that is open")
        fresh = tuple(dict.fromkeys(ids))
        self._fresh, self._deadline = (verb, fresh), deadline
        owed: dict[tuple[str, Verb], _Duty] = {key: _Duty(old, ()) for key, old in self._kept.items()}
        self._kept = {}
        wanted: list[tuple[str, Verb, tuple[str, ...]]] = [(owner, "drop", drops[owner]) for owner in drops]
        if fresh:
            wanted += [(process, verb, fresh) for process in dict.fromkeys((*self._members, *drops))]
        for process, its_verb, its_ids in wanted:
            duty = owed.setdefault((process, its_verb), _Duty((), ()))
            old = set(duty.old)
            duty.new = tuple(one for one in dict.fromkeys(its_ids) if one not in old) if old else its_ids
        for duty in owed.values():
            duty.not_before = now
        self._open = owed
        self._running = True

    def due(self, now: float) -> list[Order]:
        """Claim what is to be sent now; each order has to end in `done` or `failed`."""
        orders: list[Order] = []
        for (process, verb), duty in self._open.items():
            left = self.attempts - duty.attempts
            if duty.under_way is not None or left < 1 or not duty.not_before <= now < self._deadline:
                continue
            self._serial += 1
            duty.attempts += 1
            duty.under_way = self._serial
            until = now + (self._deadline - now) / left
            orders.append(Order(process, verb, duty.old + duty.new, duty.attempts, until, self._serial))
        return orders

    def next_at(self) -> float | None:
        """When `due` has to be asked again, if nothing ends before; None: nothing is to be sent any more."""
        waiting = [
            duty.not_before
            for duty in self._open.values()
            if duty.under_way is None and duty.attempts < self.attempts and duty.not_before < self._deadline
        ]
        return min(waiting, default=None)

    def done(self, order: Order, incarnation: str | None) -> int:
        """Take note that an order was carried out.

        Args:
            order: which.
            incarnation: of the process that answered; None: it did not say.

        Returns:
            How many ids the process is no longer owed because it turned out to be another one than before.
        """
        if self._duty(order) is None:
            return 0
        del self._open[order.process, order.verb]
        if incarnation is None or order.process not in self._members:
            return 0
        before = self._members[order.process]
        self._members[order.process] = incarnation
        return self._forget(order.process) if before not in (None, incarnation) else 0

    def failed(self, order: Order, why: str, now: float) -> None:
        """Take note that an order was not carried out, or that nobody knows."""
        duty = self._duty(order)
        if duty is not None:
            duty.under_way = None
            duty.why = why
            duty.not_before = now + self.pause_s * 2 ** (duty.attempts - 1)

    def end(self) -> Ending:
        """Close the clear; what was not done is kept, or given up if it was kept before. Idempotent."""
        kept: list[Failure] = []
        given_up: list[Failure] = []
        for (process, verb), duty in self._open.items():
            if duty.old:
                given_up.append(Failure(process, verb, duty.old, duty.why))
            if duty.new:
                self._kept[process, verb] = duty.new
                kept.append(Failure(process, verb, duty.new, duty.why))
        self._open = {}
        self._running = False
        self._fresh = ("drain", ())
        return Ending(tuple(kept), tuple(given_up))

    def _duty(self, order: Order) -> _Duty | None:
        """The duty that an order is of, unless it ended, or began again, since."""
        duty = self._open.get((order.process, order.verb))
        return duty if duty is not None and duty.under_way == order.serial else None

    def _forget(self, process: str) -> int:
        """Drop what a process that ended was owed by earlier clears, and send what it is owed by this one anew."""
        forgotten = sum(len(self._kept.pop(key)) for key in [key for key in self._kept if key[0] == process])
        for key in [key for key in self._open if key[0] == process]:
            duty = self._open[key]
            forgotten += len(duty.old)
            if duty.new:
                self._open[key] = _Duty((), duty.new)
            else:
                del self._open[key]
        return forgotten
