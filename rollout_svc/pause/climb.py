"""One pause on its way up: what it was asked for, and what it has found so far.

Invariants:

- A join only widens it: more lanes, a stronger mode, an earlier deadline; `grown` counts the first two.
- The rungs are placed between `anchor`, the moment the ladder started or grew, and the deadline in force.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollout_svc.gate import Lane, Mode
from rollout_svc.pause.plan import Rungs, plan_rungs
from rollout_svc.pause.report import Abandoned, RungRecord, WorkerTally
from rollout_svc.workers.worker import Cache, EngineCall, Worker

__all__ = ["Climb"]


@dataclass(eq=False)
class Climb:
    """See the module's invariants.

    Attributes:
        cache: in mode `keep`, what becomes of the cache of frozen requests.
        started: loop time of the gate.
        deadline: loop time in force; a join can only make it earlier.
        anchor: loop time from which the rungs are counted.
        aborting: the ladder has started: in mode `keep` only for workers that did not freeze.
        grown: how often a join asked for more.
        asked: how often something else was asked for, by a join or by the ladder.
    """

    ticket: int
    mode: Mode
    cache: Cache
    lanes: frozenset[Lane]
    started: float
    deadline: float
    anchor: float
    aborting: bool = False
    grown: int = 0
    asked: int = 0
    rungs: list[RungRecord] = field(default_factory=list)
    tallies: dict[str, WorkerTally] = field(default_factory=dict)
    unconfirmed: dict[str, list[EngineCall]] = field(default_factory=dict)
    abandoned: list[Abandoned] = field(default_factory=list)
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    drains: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    counts: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def plan(self) -> Rungs:
        """The rungs under the deadline in force."""
        return plan_rungs(self.anchor, self.deadline)

    @property
    def last_look(self) -> float:
        """At the report rung a last look at the engines still gets half of the tenth that is left."""
        return self.plan.report + (self.plan.deadline - self.plan.report) / 2

    def holds(self, worker: Worker) -> bool:
        """Whether what this worker runs is to stay there, and its engine confirmed that nothing moves."""
        return self.mode == "keep" and worker.frozen

    def calls(self, worker: Worker) -> list[EngineCall]:
        """What has to leave this worker before the pause is over."""
        return [] if self.holds(worker) else worker.in_lanes(self.lanes)

    def count(self, worker: Worker) -> int:
        """How many calls those are; asked at every rung, so it looks at none of them."""
        return 0 if self.holds(worker) else worker.count(self.lanes)

    def grow(self, lanes: frozenset[Lane], mode: Mode, now: float) -> None:
        """Ask for more; the rungs are counted anew from here."""
        self.mode, self.aborting = mode, mode == "abort"  # in mode `wait` a lane that comes late may finish as well
        self.lanes |= lanes
        self.anchor = now
        self.grown += 1
        self.over = False
        self.wake.set()
        self._stir()

    def start_aborting(self, now: float) -> None:
        """The time to finish or to freeze is up: the ladder starts."""
        self.aborting = True
        self.anchor = now
        self._stir()

    def finish(self) -> None:
        """Nothing is aborted any more."""
        self.over = True
        self._stir()

    async def rest(self, seconds: float) -> bool:
        """Wait until something else is asked for, at most `seconds`; returns whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
        except TimeoutError:
            return False
        return True

    def ended(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled has ended."""
        self.ending.discard(task)
        self.wake.set()

    def _stir(self) -> None:
        self.asked += 1
        stirred, self._stirred = self._stirred, asyncio.Event()
        stirred.set()
