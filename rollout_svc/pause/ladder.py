"""The one function that climbs the ladder.

Invariants:

- Every wait ends at a rung's time or earlier; the climb is over by the report rung, whatever the engines do.
- Workers are aborted, and later counted, side by side: one that is stuck costs the others nothing.
- No abort is sent after the climb is over.
- What was cancelled counts as abandoned until the engine's own count is 0; its worker is quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from rollout_svc.events import EventBus, RungReached
from rollout_svc.gate import Lane
from rollout_svc.judging import Judging
from rollout_svc.pause.plan import Rungs, plan_rungs, reabort_delays
from rollout_svc.pause.report import Abandoned, RungRecord, WorkerTally
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.pool import CONTROL_TIMEOUT_S, WorkerPool
from rollout_svc.workers.supervisor import Supervisor
from rollout_svc.workers.worker import EngineCall, Worker, WorkerState

__all__ = ["Climb", "Ladder"]

_SLICE: Final = 128  # cancellations between two yields: 2-5 ms of the loop
_CLOSE_AT_ABORT: Final = 2  # by id, the second abort also closes the call's connection
_COUNT_POLL_S: Final = 0.02  # seconds before an engine that is not idle yet is asked again, doubling
_COUNT_POLL_CAP_S: Final = 0.5
_COUNTED: Final = frozenset({WorkerState.ACTIVE, WorkerState.RECOVERING, WorkerState.QUARANTINED, WorkerState.DRAINING})


@dataclass(eq=False)
class Climb:
    """One pause on its way up; a joining pause widens it.

    Attributes:
        started_from: the ticket before this pause, which a joining pause may name.
        started: loop time of the gate.
        deadline: loop time in force; a join can only make it earlier.
    """

    ticket: int
    started_from: int
    mode: str
    lanes: frozenset[Lane]
    started: float
    deadline: float
    rungs: list[RungRecord] = field(default_factory=list)
    tallies: dict[str, WorkerTally] = field(default_factory=dict)
    unconfirmed: dict[str, list[EngineCall]] = field(default_factory=dict)
    abandoned: list[Abandoned] = field(default_factory=list)
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    drains: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled has ended."""
        self.ending.discard(task)
        self.wake.set()

    @property
    def plan(self) -> Rungs:
        """The rungs under the deadline in force."""
        return plan_rungs(self.started, self.deadline)


class Ladder:
    """Climbs, one pause at a time."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        rollouts: Rollouts,
        judging: Judging,
        supervisor: Supervisor,
        tasks: TaskOwner,
        bus: EventBus,
        abort_interval_s: float,
    ) -> None:
        self._pool = pool
        self._rollouts = rollouts
        self._judging = judging
        self._supervisor = supervisor
        self._tasks = tasks
        self._bus = bus
        self._abort_interval_s = abort_interval_s
        self._climb: Climb | None = None
        pool.subscribe(self._changed)
        rollouts.subscribe(self._changed)
        pool.on_end = self._call_ended
        pool.on_answer = self._call_answered

    # -- the climb -------------------------------------------------------------------------------------------

    async def climb(self, climb: Climb) -> None:
        """Stop everything in the climb's lanes; it was begun, so the gate is closed and the aborts are on their way."""
        try:
            self._reached(climb, "gate")
            self._reached(climb, "abort")
            confirmed = False
            while not confirmed:
                lanes = climb.lanes
                await self._rungs(climb)
                if climb.lanes != lanes:
                    continue  # a join brought lanes to rungs that were past: what is due is done for them at once
                self._reached(climb, "report")
                confirmed = await self._confirm_idle(climb)
        finally:
            climb.over.set()
            for drain in climb.drains.values():
                drain.cancel()
            self._climb = None
        self._rollouts.rest(climb.lanes)
        self._abandon(climb)

    def begin(self, climb: Climb) -> None:
        """Count what runs and send the aborts, in the step that closed the gate."""
        self._climb = climb
        self.enter(climb, climb.lanes)

    def enter(self, climb: Climb, lanes: frozenset[Lane]) -> None:
        """Take lanes into the climb: count what runs there, and abort it at every worker at once."""
        climb.over.clear()
        for worker in self._pool.workers.values():
            tally = climb.tallies.setdefault(worker.worker_id, WorkerTally())
            tally.in_flight += len(worker.in_lanes(lanes))
            drain = climb.drains.get(worker.worker_id)
            if drain is None or drain.done():
                task = self._tasks.spawn(f"drain:{worker.worker_id}", self._drain(worker, climb))
                climb.drains[worker.worker_id] = task
        climb.wake.set()

    async def _rungs(self, climb: Climb) -> None:
        """Wait for what is pending, and help it along at each rung."""
        if await self._until(climb, lambda: climb.plan.judges):
            return
        self._reached(climb, "judges")
        await _in_slices(lambda: self._judging.interrupt(climb.lanes, _SLICE))
        if await self._until(climb, lambda: climb.plan.http):
            return
        self._reached(climb, "http")
        await _in_slices(lambda: self._cancel_calls(climb))
        if await self._until(climb, lambda: climb.plan.tasks):
            return
        self._reached(climb, "tasks")
        await _in_slices(lambda: self._hand_back(climb))
        await self._until(climb, lambda: climb.plan.report)

    async def _until(self, climb: Climb, when: Callable[[], float]) -> bool:
        """Wait until nothing is pending (True) or the rung's time, which a join may move (False)."""
        loop = asyncio.get_running_loop()
        while not self._quiet(climb):
            if loop.time() >= when():
                return False
            climb.wake.clear()
            try:
                async with asyncio.timeout_at(when()):
                    await climb.wake.wait()
            except TimeoutError:
                continue
        return True

    def _quiet(self, climb: Climb) -> bool:
        if any(self._pool.in_flight[lane] for lane in climb.lanes) or climb.ending:
            return False
        return not self._judging.pending(climb.lanes) and not self._rollouts.pending(climb.lanes)

    def _cancel_calls(self, climb: Climb) -> int:
        """Cancel a slice of the unanswered calls; returns how many."""
        calls = (call for worker in self._pool.workers.values() for call in worker.in_lanes(climb.lanes))
        return sum(call.cancel("pause") for call in islice((c for c in calls if c.cancelled_for is None), _SLICE))

    def _hand_back(self, climb: Climb) -> int:
        """Take a slice of the groups back from their tasks; returns how many."""
        tasks = self._rollouts.hand_back(climb.lanes, _SLICE)
        for task in tasks:
            if not task.done():
                climb.ending.add(task)
                task.add_done_callback(climb.ended)
        return len(tasks)

    # -- one worker ------------------------------------------------------------------------------------------

    async def _drain(self, worker: Worker, climb: Climb) -> None:
        """Abort what runs at one worker, and again while something survives."""
        for delay in reabort_delays(self._abort_interval_s):
            calls = worker.in_lanes(climb.lanes)
            if not calls or climb.over.is_set():
                return
            await self._abort(worker, calls, climb)
            try:
                async with asyncio.timeout(delay):
                    await climb.over.wait()
            except TimeoutError:
                continue

    async def _abort(self, worker: Worker, calls: list[EngineCall], climb: Climb) -> None:
        timeout_s = min(CONTROL_TIMEOUT_S, max(0.05, climb.plan.report - asyncio.get_running_loop().time()))
        if worker.exclusive and len(calls) == len(worker.calls):
            await self._abort_all(worker, timeout_s)
            return
        for call in calls:
            call.aborts += 1
        await self._pool.abort(worker, [call.request_id for call in calls], timeout_s)
        for call in calls:
            if call.aborts >= _CLOSE_AT_ABORT and call.request_id in worker.calls:
                call.cancel("pause")

    async def _abort_all(self, worker: Worker, timeout_s: float) -> None:
        """Abort everything at a worker; no lane may start there between the caller's look and the engine's."""
        if worker.held:
            return  # it is being done
        worker.held = True
        try:
            await self._pool.abort(worker, None, timeout_s)
        finally:
            worker.held = False
            self._pool.changed()

    def _call_ended(self, worker: Worker, call: EngineCall) -> None:
        climb = self._climb
        if climb is None or call.lane not in climb.lanes:
            return
        tally = climb.tallies.get(worker.worker_id)
        if tally is None:
            return
        if call.cancelled_for is None:
            tally.answered += 1
        else:
            tally.cancelled += 1
            climb.unconfirmed.setdefault(worker.worker_id, []).append(call)

    def _call_answered(self, worker: Worker, call: EngineCall, late: bool) -> None:
        climb = self._climb
        if late and climb is not None and call.lane in climb.lanes and worker.worker_id in climb.tallies:
            climb.tallies[worker.worker_id].late += 1

    # -- the end ---------------------------------------------------------------------------------------------

    async def _confirm_idle(self, climb: Climb) -> bool:
        """Ask every engine for its own count, and abort what it still has, until it is 0 or the time is up.

        Returns:
            Whether that is the end: False when a join brought lanes that have to be climbed for as well.
        """
        climb.over.set()  # every call has ended or was cancelled: what is left to abort is the engines' own
        lanes = climb.lanes
        workers = [w for w in self._pool.workers.values() if w.worker_id in climb.tallies and w.state in _COUNTED]
        asking = [self._tasks.spawn(f"count:{w.worker_id}", self._count(w, climb)) for w in workers]
        # Aborts on their way are waited for as well: one that arrived after a resume would hit new requests.
        waiting = [*asking, *climb.drains.values()]
        for task in waiting:
            task.add_done_callback(lambda _: climb.wake.set())
        loop = asyncio.get_running_loop()
        try:
            while climb.lanes == lanes and not all(task.done() for task in waiting):
                if loop.time() >= _last_look(climb):
                    break
                climb.wake.clear()
                try:
                    async with asyncio.timeout_at(_last_look(climb)):
                        await climb.wake.wait()
                except TimeoutError:
                    continue
        finally:
            for task in asking:
                task.cancel()
        return climb.lanes == lanes

    async def _count(self, worker: Worker, climb: Climb) -> None:
        if not worker.exclusive or "count" not in worker.capabilities:
            return
        loop, delay = asyncio.get_running_loop(), _COUNT_POLL_S
        tally = climb.tallies[worker.worker_id]
        tally.residual = None  # what was counted before a join was for fewer lanes
        quarantine = worker.quarantine
        if quarantine is not None and quarantine.kind == "residual" and worker.worker_id not in climb.unconfirmed:
            tally.residual = worker.residual  # its supervisor asks all the time; a frozen one must not cost every pause
            return
        while True:
            before = [call.request_id for call in worker.calls.values() if call.lane not in climb.lanes]
            count = await self._supervisor.count(worker)
            # A call that began meanwhile may not be there yet: subtracted, it would hide one that we look for.
            others = sum(request_id in worker.calls for request_id in before)
            tally.residual = worker.residual = None if count is None else max(0, count - others)
            if tally.residual == 0:
                climb.unconfirmed.pop(worker.worker_id, None)
                return
            if count and not worker.calls:
                # It runs on what we do not wait for any more: a connection broke, or a call was cancelled.
                await self._abort_all(worker, max(_COUNT_POLL_S, _last_look(climb) - loop.time()))
            if worker.worker_id not in climb.unconfirmed and (count is None or worker.quarantine is not None):
                # Every request of this pause was answered. That it cannot count now is said by `residual: null`;
                # what an earlier pause left running there is named again, and its way back is the quarantine's.
                return
            if loop.time() + delay >= climb.plan.report:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, _COUNT_POLL_CAP_S)

    def _abandon(self, climb: Climb) -> None:
        """Name whatever still runs, and keep its worker from traffic."""
        now = asyncio.get_running_loop().time()
        for worker_id, tally in climb.tallies.items():
            worker = self._pool.workers.get(worker_id)
            named = climb.unconfirmed.get(worker_id, [])
            unnamed = max(0, (tally.residual or 0) - len(named))
            tally.abandoned = len(named) + unnamed
            climb.abandoned += [Abandoned(call.sample_id, worker_id, now - call.since) for call in named]
            climb.abandoned += [Abandoned(None, worker_id, now - climb.started)] * unnamed
            if tally.abandoned and worker is not None:
                worker.residual = tally.residual  # an older count would say that it is idle
                worker.put_in_quarantine("residual", f"pause {climb.ticket} left {tally.abandoned} requests running")
        for straggler in self._rollouts.stragglers:
            climb.abandoned.append(Abandoned(straggler.sample_id, None, now - straggler.since))
        for call in self._judging.clinging:
            climb.abandoned += [Abandoned(sample_id, None, now - call.since) for sample_id in call.sample_ids]

    def _reached(self, climb: Climb, name: str) -> None:
        at_s = asyncio.get_running_loop().time() - climb.started
        pending = (
            sum(self._pool.in_flight[lane] for lane in climb.lanes)
            + self._judging.pending(climb.lanes)
            + sum(run.putting is not None for run in self._rollouts.runs(climb.lanes))
        )
        climb.rungs.append(RungRecord(name, at_s, pending))
        self._bus.emit(RungReached(climb.ticket, name, at_s, pending))

    def _changed(self) -> None:
        if self._climb is not None:
            self._climb.wake.set()


def _last_look(climb: Climb) -> float:
    """At the report rung a last look at the engines still gets half of the tenth that is left."""
    return climb.plan.report + (climb.plan.deadline - climb.plan.report) / 2


async def _in_slices(some: Callable[[], int]) -> None:
    """Call `some` until it has nothing left to do, letting the loop breathe in between."""
    while True:
        if not some():
            return
        await asyncio.sleep(0)
