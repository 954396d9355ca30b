"""Who may pause and resume, and what they are told.

Invariants:

- One climb at a time. A pause that finds one under way joins it: union of lanes, earlier deadline, stronger mode,
  same ticket. One that finds the stage paused as strongly as it asks gets that pause's report.
- The gate closes, and in mode `abort` the epoch rises, in the step that accepts the pause, before anything is awaited.
- A caller that is cancelled leaves the climb alone; only its wait ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from rollout_svc.errors import Conflict
from rollout_svc.events import EventBus, PauseFinished, PauseStarted, Resumed
from rollout_svc.gate import LANES, Gate, Lane, Mode, stronger
from rollout_svc.pause.climb import Climb
from rollout_svc.pause.ladder import Ladder
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.standing import Standing
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.freezing import Freezing
from rollout_svc.workers.worker import Cache

__all__ = ["PauseController"]


class PauseController(Standing):
    """The pause protocol, and its state; `closed_at`: loop time of the pause that everything is stopped by."""

    def __init__(
        self,
        *,
        gate: Gate,
        ladder: Ladder,
        freezing: Freezing,
        rollouts: Rollouts,
        tasks: TaskOwner,
        bus: EventBus,
        ledger: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__()
        self.closed_at = 0.0
        self._gate = gate
        self._ladder = ladder
        self._freezing = freezing
        self._rollouts = rollouts
        self._tasks = tasks
        self._bus = bus
        self._ledger = ledger
        self._cache: Cache = "keep"
        self._climb: Climb | None = None
        self._climbing: asyncio.Task[PauseReport] | None = None

    async def pause(
        self,
        *,
        mode: Mode,
        deadline_s: float,
        lanes: Iterable[Lane] = LANES,
        if_ticket: int | None = None,
        cache: Cache = "keep",
    ) -> PauseReport:
        """Stop `lanes`; returns by the deadline with what was found. Mode `keep` is for all lanes.

        Raises:
            Conflict: `if_ticket` is not the current ticket; or caches are to be dropped of what is frozen with them.
        """
        wanted = frozenset(lanes)
        self.check_pause(if_ticket)
        if mode == "keep" and cache == "drop" != self._cache and self.held_as("keep"):
            detail = {"kv": cache, "frozen": self._cache}
            raise Conflict("requests are frozen with their cache", type="frozen", detail=detail)
        self.asked += 1
        if self._climb is not None:
            self._join(self._climb, mode, wanted, deadline_s)
        elif self.last_report is not None and not self.weaker(mode, wanted):
            return self.last_report
        else:
            self._start(mode, wanted, deadline_s, cache)
        climbing = self._climbing
        assert climbing is not None  # noqa: S101 - there is one exactly while there is a climb
        return await asyncio.shield(climbing)

    @property
    def climbing(self) -> bool:
        """Whether a pause is under way."""
        return self._climbing is not None

    async def report(self) -> None:
        """Wait until no pause is under way."""
        while self._climbing is not None:
            await asyncio.wait({self._climbing})

    def resume(self, ticket: int | None = None) -> None:
        """Open what is closed; the caller has waited for the report of a pause that was under way.

        Raises:
            Conflict: `ticket` is not the current one.
        """
        self.check_resume(ticket)
        if self.state == "running":
            return
        lanes = self._open()
        self._freezing.thaw_all()
        self._gate.open(lanes)
        self._bus.emit(Resumed(self.ticket, lanes))

    def hold(self) -> None:
        """Begin as if a pause had returned, under the ticket there is: nothing starts before the first resume."""
        self.closed_at = asyncio.get_running_loop().time()
        super()._close(LANES, "abort")
        self.state = "paused"
        self.last_report = PauseReport(self.ticket, "abort", 0.0, [], {}, [], [], self._ledger())

    def _start(self, mode: Mode, lanes: frozenset[Lane], deadline_s: float, cache: Cache) -> None:
        now = asyncio.get_running_loop().time()
        if self.state != "paused":
            self.closed_at = now
        # What an earlier, weaker pause left frozen, or let run, is climbed for as well.
        lanes |= self.weaker(mode, self.closed)
        self._cache = cache
        self._begin(lanes, mode)
        self._bus.emit(PauseStarted(self.ticket, mode, tuple(sorted(lanes)), deadline_s, joined=False))
        climb = Climb(self.ticket, mode, cache, lanes, now, now + deadline_s, now)
        self._climb = climb
        self._ladder.begin(climb)
        self._climbing = self._tasks.spawn(f"pause:{self.ticket}", self._run(climb))

    def _join(self, climb: Climb, mode: Mode, lanes: frozenset[Lane], deadline_s: float) -> None:
        now = asyncio.get_running_loop().time()
        new, mode = lanes - climb.lanes, mode if stronger(mode, climb.mode) else climb.mode
        climb.deadline = min(climb.deadline, now + deadline_s)
        if new or mode != climb.mode:
            self._close(climb.lanes | new, mode)
            self._ladder.grow(climb, new, mode)
        climb.wake.set()
        self._bus.emit(PauseStarted(self.ticket, climb.mode, tuple(sorted(lanes)), deadline_s, joined=True))

    def _close(self, lanes: Iterable[Lane], mode: Mode) -> None:
        super()._close(lanes, mode)
        self._gate.close(lanes, mode)

    async def _run(self, climb: Climb) -> PauseReport:
        loop = asyncio.get_running_loop()
        try:
            await self._ladder.climb(climb)
            report = PauseReport(
                ticket=climb.ticket,
                mode=climb.mode,
                elapsed_s=loop.time() - climb.started,
                rungs=climb.rungs,
                workers=climb.tallies,
                parked=[member.sample.sample_id for member in self._rollouts.parked(climb.lanes)],
                abandoned=climb.abandoned,
                ledger=self._ledger(),
            )
        finally:
            self._climb = None
            self._climbing = None
            self._end()
        self._returned(report)
        self._bus.emit(
            PauseFinished(
                report.ticket, climb.mode, report.clean, report.elapsed_s, len(report.abandoned), len(report.parked)
            )
        )
        return report
