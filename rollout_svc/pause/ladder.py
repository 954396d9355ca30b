"""The one function that climbs the ladder.

Invariants:

- Every wait ends at a rung's time or earlier; the climb is over by the report rung, whatever the engines do.
- In mode `wait` nothing is ended before half of the time; in mode `keep` only what an engine did not freeze is.
- The right of running requests to finish is withdrawn in the step that starts the ladder, and never in mode `keep`.
- What was cancelled counts as abandoned until the engine's own count is 0; its worker is quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeVar

from rollout_svc.events import EventBus, RungReached
from rollout_svc.gate import Gate, Lane, Mode
from rollout_svc.judging import Judging
from rollout_svc.pause.climb import Climb
from rollout_svc.pause.draining import Draining
from rollout_svc.pause.report import Abandoned, RungRecord, WorkerTally
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.run import GroupRun
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import EngineCall, Worker, WorkerState

__all__ = ["Ladder"]

T = TypeVar("T")

_SLICE: Final = 128  # cancellations between two yields: 2-5 ms of the loop
_COUNTED: Final = frozenset({WorkerState.ACTIVE, WorkerState.RECOVERING, WorkerState.QUARANTINED, WorkerState.DRAINING})


class Ladder:
    """Climbs, one pause at a time."""

    def __init__(
        self,
        *,
        gate: Gate,
        pool: WorkerPool,
        rollouts: Rollouts,
        judging: Judging,
        draining: Draining,
        tasks: TaskOwner,
        bus: EventBus,
    ) -> None:
        self._gate = gate
        self._pool = pool
        self._rollouts = rollouts
        self._judging = judging
        self._draining = draining
        self._tasks = tasks
        self._bus = bus
        self._climb: Climb | None = None
        pool.subscribe(self._changed)
        rollouts.subscribe(self._changed)
        pool.on_end = self._call_ended
        pool.on_answer = self._call_answered

    # -- the climb -------------------------------------------------------------------------------------------

    def begin(self, climb: Climb) -> None:
        """Count what runs and send the aborts, in the step that closed the gate."""
        self._climb = climb
        climb.aborting = climb.mode == "abort"
        self._draining.begin()
        self._enter(climb, climb.lanes)

    def grow(self, climb: Climb, lanes: frozenset[Lane], mode: Mode) -> None:
        """Take lanes, or a stronger mode, into the climb, in the step that closed the gate for them."""
        climb.grow(lanes, mode, asyncio.get_running_loop().time())
        self._enter(climb, lanes)

    def _enter(self, climb: Climb, lanes: frozenset[Lane]) -> None:
        _cancel(climb.counts)
        for worker in self._pool.workers.values():
            tally = climb.tallies.setdefault(worker.worker_id, WorkerTally())
            tally.in_flight += worker.count(lanes)
            tally.residual = None  # what was counted before a join says nothing of what it stops
        self._draining.start(climb)

    async def climb(self, climb: Climb) -> None:
        """Stop everything in the climb's lanes; it was begun, so the gate is closed and the aborts are on their way."""
        try:
            self._reached(climb, "gate")
            grown = -1
            while grown != climb.grown:
                grown = climb.grown
                await self._stages(climb)
                if grown == climb.grown:
                    self._gate.finish(climb.lanes)
                    self._reached(climb, "report")
                    await self._confirm_idle(climb)
        finally:
            climb.finish()
            _cancel(climb.drains)
            _cancel(climb.counts)
            self._climb = None
            self._draining.end()
        if climb.mode != "keep":
            self._rollouts.rest(climb.lanes)
        self._abandon(climb)

    async def _stages(self, climb: Climb) -> None:
        """Go as far as the mode asks for, until nothing is pending or a join asked for more."""
        if not climb.aborting:
            keep = climb.mode == "keep"
            self._reached(climb, "freeze" if keep else "wait")
            if await self._until(climb, lambda: climb.plan.freeze if keep else climb.plan.wait):
                return
            self._withdraw(climb)
        self._reached(climb, "abort")
        await self._rungs(climb)

    def _withdraw(self, climb: Climb) -> None:
        """What is still running has had its time: start the ladder."""
        if climb.mode == "wait":
            self._gate.close(climb.lanes, "abort")
        climb.start_aborting(asyncio.get_running_loop().time())
        self._draining.start(climb)

    async def _rungs(self, climb: Climb) -> None:
        """Wait for what is pending, and help it along at each rung."""
        if await self._until(climb, lambda: climb.plan.judges):
            return
        if climb.mode != "keep":
            self._reached(climb, "judges")
            await _in_slices(lambda: self._judging.interrupt(climb.lanes, _SLICE))
        if await self._until(climb, lambda: climb.plan.http):
            return
        self._reached(climb, "http")
        await _in_slices(_again_and_again(lambda: self._open_calls(climb), _cancel_some))
        if await self._until(climb, lambda: climb.plan.tasks):
            return
        if climb.mode != "keep":
            self._reached(climb, "tasks")
            await _in_slices(
                _again_and_again(lambda: self._open_runs(climb), lambda left: self._hand_back(climb, left))
            )
        await self._until(climb, lambda: climb.plan.report)

    async def _until(self, climb: Climb, when: Callable[[], float]) -> bool:
        """Wait until nothing is pending or a join asks for more (True), or the rung's time has come (False)."""
        loop, grown = asyncio.get_running_loop(), climb.grown
        while climb.grown == grown and not self._quiet(climb):
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
        if climb.mode == "keep":
            return not any(climb.count(worker) for worker in self._pool.workers.values())
        if any(self._pool.in_flight[lane] for lane in climb.lanes) or climb.ending:
            return False
        return not self._judging.pending(climb.lanes) and not self._rollouts.busy(climb.lanes)

    def _open_calls(self, climb: Climb) -> Iterator[EngineCall]:
        """Calls that nobody has ended yet, a worker at a time, as they are then."""
        for worker in tuple(self._pool.workers.values()):
            for call in climb.calls(worker):
                if call.cancelled_for is None:
                    yield call

    def _open_runs(self, climb: Climb) -> Iterator[GroupRun]:
        return iter(self._rollouts.runs(climb.lanes))

    def _hand_back(self, climb: Climb, left: Iterator[GroupRun]) -> int:
        """Take a slice of the groups back from their tasks; returns how many tasks."""
        tasks = self._rollouts.hand_back(left, _SLICE)
        for task in tasks:
            if not task.done():
                climb.ending.add(task)
                task.add_done_callback(climb.ended)
        return len(tasks)

    # -- what calls come to ----------------------------------------------------------------------------------

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
        if not worker.calls:
            self._count(climb, worker)  # beside what its answers still have to go through here

    def _count(self, climb: Climb, worker: Worker) -> asyncio.Task[None]:
        """Have an engine whose last call has ended asked for its own count, once."""
        known = climb.counts.get(worker.worker_id)
        if known is None:
            work = self._draining.count(worker, climb)
            known = climb.counts[worker.worker_id] = self._tasks.spawn(f"count:{worker.worker_id}", work)
        return known

    def _call_answered(self, worker: Worker, call: EngineCall, late: bool) -> None:
        climb = self._climb
        if late and climb is not None and call.lane in climb.lanes and worker.worker_id in climb.tallies:
            climb.tallies[worker.worker_id].late += 1

    # -- the end ---------------------------------------------------------------------------------------------

    async def _confirm_idle(self, climb: Climb) -> None:
        """Ask every engine for its own count, and abort what it still has, until it is 0 or the time is up.

        A join that asks for more ends it: that has to be climbed for as well.
        """
        climb.finish()  # every call has ended or was cancelled: what is left to abort is the engines' own
        grown = climb.grown
        workers = [w for w in self._pool.workers.values() if w.worker_id in climb.tallies and w.state in _COUNTED]
        # Aborts on their way are waited for as well: one that arrived after a resume would hit new requests.
        waiting = [*(self._count(climb, worker) for worker in workers), *climb.drains.values()]
        for task in waiting:
            task.add_done_callback(lambda _: climb.wake.set())
        loop = asyncio.get_running_loop()
        while climb.grown == grown and not all(task.done() for task in waiting):
            if loop.time() >= climb.last_look:
                break
            climb.wake.clear()
            try:
                async with asyncio.timeout_at(climb.last_look):
                    await climb.wake.wait()
            except TimeoutError:
                continue

    def _abandon(self, climb: Climb) -> None:
        """Name whatever still runs, and keep its worker from traffic."""
        now = asyncio.get_running_loop().time()
        for worker_id, tally in climb.tallies.items():
            worker = self._pool.workers.get(worker_id)
            still_open = [] if worker is None else climb.calls(worker)  # cancelled, and not out of the loop yet
            named = climb.unconfirmed.get(worker_id, []) + still_open
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
        pending = sum(climb.count(worker) for worker in self._pool.workers.values())
        if climb.mode != "keep":
            pending += self._judging.pending(climb.lanes)
            pending += sum(run.putting is not None for run in self._rollouts.runs(climb.lanes))
        climb.rungs.append(RungRecord(name, at_s, pending))
        self._bus.emit(RungReached(climb.ticket, name, at_s, pending))

    def _changed(self) -> None:
        if self._climb is not None:
            self._climb.wake.set()


def _cancel(tasks: dict[str, asyncio.Task[None]]) -> None:
    for task in tasks.values():
        task.cancel()
    tasks.clear()


def _cancel_some(left: Iterator[EngineCall]) -> int:
    return sum(call.cancel("pause") for call in islice(left, _SLICE))


def _again_and_again(every: Callable[[], Iterator[T]], some: Callable[[Iterator[T]], int]) -> Callable[[], int]:
    """Go on where the slice before ended, and begin anew at the end: what is done is not looked at at every slice."""
    left: Iterator[T] = iter(())

    def slice_of() -> int:
        nonlocal left
        done = some(left)
        if not done:
            left = every()
            done = some(left)
        return done

    return slice_of


async def _in_slices(some: Callable[[], int]) -> None:
    """Call `some` until it has nothing left to do, letting the loop breathe in between."""
    while True:
        if not some():
            return
        await asyncio.sleep(0)
