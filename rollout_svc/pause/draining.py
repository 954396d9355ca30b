"""One worker's part in a pause: frozen, or aborted again and again, and at last asked for its own count.

Invariants:

- Workers are served side by side: one that is stuck costs the others nothing.
- No abort is sent after the climb is over.
- An engine that is or may be frozen is told to go on after each abort, so that the abort takes effect.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from rollout_svc.pause.climb import Climb
from rollout_svc.pause.plan import reabort_delays
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.control import CONTROL_TIMEOUT_S, Control
from rollout_svc.workers.freezing import Freezing, can_freeze
from rollout_svc.workers.merging import total
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.supervisor import Supervisor
from rollout_svc.workers.worker import EngineCall, Worker

__all__ = ["Draining"]

_CLOSE_AT_ABORT: Final = 2  # by id, the second abort also closes the call's connection
_COUNT_POLL_S: Final = 0.02  # seconds before an engine that is not idle yet is asked again, doubling
_COUNT_POLL_CAP_S: Final = 0.5
_TRIAL_S: Final = 0.5  # seconds a canary under way gets to be over
_LEAST_TIMEOUT_S: Final = 0.05  # seconds an attempt gets although the rungs are nearly over


class Draining:
    """Freezes, aborts and counts, one worker at a time per task."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        freezing: Freezing,
        control: Control,
        supervisor: Supervisor,
        tasks: TaskOwner,
        abort_interval_s: float,
    ) -> None:
        self._pool = pool
        self._freezing = freezing
        self._control = control
        self._supervisor = supervisor
        self._tasks = tasks
        self._abort_interval_s = abort_interval_s

    def begin(self) -> None:
        """Let no worker in until `end`."""
        self._supervisor.hold()

    def end(self) -> None:
        """Let workers in again."""
        self._supervisor.release()

    def start(self, climb: Climb) -> None:
        """Have every worker served; one that is served already has been told of what is asked for now."""
        for worker in self._pool.workers.values():
            task = climb.drains.get(worker.worker_id)
            if task is None or task.done():
                name = f"drain:{worker.worker_id}"
                climb.drains[worker.worker_id] = self._tasks.spawn(name, self._serve(worker, climb))

    async def _serve(self, worker: Worker, climb: Climb) -> None:
        """Do what is asked for, again and again while something survives, and anew when something else is."""
        anew = True
        while anew:
            anew = False
            for delay in reabort_delays(self._abort_interval_s):
                if climb.over:
                    return
                asked = climb.asked
                again = await self._round(worker, climb)
                if climb.asked == asked and not again:
                    return
                if climb.asked != asked or await climb.rest(delay):  # also where it was asked for during the round
                    anew = True
                    break

    async def _round(self, worker: Worker, climb: Climb) -> bool:
        """Make one attempt; returns whether another may be needed."""
        if not climb.aborting and climb.mode == "wait":
            return not await self._freezing.thaw(worker, _timeout_s(climb.plan.wait))
        # While a thaw that was given up may still arrive no freeze is to be trusted: nothing is waited for.
        trusted = not self._freezing.may_thaw(worker, climb.plan.freeze)
        if not climb.aborting and can_freeze(worker, climb.cache) and trusted:
            if worker.calls and not await self._freezing.freeze(worker, climb.cache, _timeout_s(climb.plan.freeze)):
                return True
            climb.wake.set()
            return False
        calls = [call for call in climb.calls(worker) if call.answer is None]  # what came needs no abort to come
        going_on = worker.freeze is None or climb.holds(worker)
        if calls:
            await self._abort(worker, calls, climb)
        if not going_on:
            await self._freezing.thaw(worker, _timeout_s(climb.plan.report))
        await self._freezing.thaw_late(worker)
        return bool(calls) or not going_on

    async def _abort(self, worker: Worker, calls: list[EngineCall], climb: Climb) -> None:
        for call in calls:
            call.aborts += 1
        # What was answered, its routed experts still being read, may be there as well: only then is it looked for.
        everything = len(calls) == len(worker.calls) or len(calls) == sum(
            call.answer is None for call in worker.calls.values()
        )
        if worker.exclusive and "abort_all" in worker.capabilities and everything:
            await self._abort_all(worker, _timeout_s(climb.plan.report))
            return
        await self._pool.abort(worker, [call.request_id for call in calls], _timeout_s(climb.plan.report))
        for call in calls:
            if call.aborts >= _CLOSE_AT_ABORT and call.request_id in worker.calls and call.answer is None:
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
            self._pool.changed(worker)

    async def _goes_on(self, worker: Worker, climb: Climb) -> bool:
        """Whether a count may be believed: what waits at the door of a frozen engine is in no count of its own.

        Where a count stands for requests without an answer, whoever froze the engine matters: a freeze of a service
        that died may have arrived since.
        """
        if not await self._freezing.thaw(worker):
            return False
        if worker.worker_id in climb.unconfirmed:
            return await self._freezing.thaw_found(worker)
        return await self._freezing.thaw_late(worker)

    @staticmethod
    async def _tried(worker: Worker, climb: Climb) -> None:
        """Give a canary that is under way a moment to be over: an engine that is well has made its token by then."""
        if worker.trial is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_TRIAL_S, _timeout_s(climb.plan.report))):
                    await worker.trial.wait()

    async def count(self, worker: Worker, climb: Climb) -> None:
        """Ask one engine for its own count, and abort what it still has, until it is 0 or the time is up."""
        if not worker.exclusive or "count" not in worker.capabilities:
            return
        loop, delay = asyncio.get_running_loop(), _COUNT_POLL_S
        tally = climb.tallies[worker.worker_id]
        quarantine = worker.quarantine
        if quarantine is not None and quarantine.kind == "residual" and worker.worker_id not in climb.unconfirmed:
            tally.residual = worker.residual  # its supervisor asks all the time; a stuck one must not cost every pause
            return
        await self._tried(worker, climb)
        while True:
            # The token its supervisor asked for may be on the way there, in no count yet.
            going_on = worker.trial is None and (climb.holds(worker) or await self._goes_on(worker, climb))
            leaving = {call.request_id for call in climb.calls(worker)}
            staying = [request_id for request_id in worker.calls if request_id not in leaving]
            counts = await self._control.counts(worker) if going_on else {}
            count = total(counts.values()) if counts else None
            if worker.front is not None:
                tally.uncounted = tuple(url for url, number in counts.items() if number is None)
            # A call that began meanwhile may not be there yet: subtracted, it would hide one that we look for.
            expected = sum(request_id in worker.calls for request_id in staying)
            tally.residual = worker.residual = None if count is None else max(0, count - expected)
            if tally.residual == 0:
                climb.unconfirmed.pop(worker.worker_id, None)
                return
            if count and not worker.calls and "abort_all" in worker.capabilities:
                # It runs on what we do not wait for any more: a connection broke, or a call was cancelled.
                await self._abort_all(worker, max(_COUNT_POLL_S, climb.last_look - loop.time()))
            if worker.worker_id not in climb.unconfirmed and (count is None or worker.quarantine is not None):
                # Every request of this pause was answered. That it cannot count now is said by `residual: null`;
                # what an earlier pause left running there is named again, and its way back is the quarantine's.
                return
            if loop.time() + delay >= climb.plan.report:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, _COUNT_POLL_CAP_S)


def _timeout_s(end: float) -> float:
    """Seconds for one control attempt that has to be over at `end`."""
    return min(CONTROL_TIMEOUT_S, max(_LEAST_TIMEOUT_S, end - asyncio.get_running_loop().time()))
