"""The slots of a fleet: who gets the next one that is free, and who is woken when one is.

Invariants:

- The gate is read and the worker is chosen in one step; whoever claimed takes the slot before its next await.
- As many are woken as there are slots. A slot that was given back wakes one, and looks at its own worker alone: what
  a request costs does not depend on the fleet.
- When no worker is in traffic everyone is woken, to say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_svc.errors import Interrupted, NoWorker
from rollout_svc.gate import Gate, Lane
from rollout_svc.sample import Sample
from rollout_svc.workers.line import Line
from rollout_svc.workers.routing import Router
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Slots"]


class Slots:
    """See the module's invariants.

    Args:
        workers: the fleet, by worker id, as it is at any time.
        gate: closed, it gives nobody a slot.
        router: chooses among those that have one.
        patience_s: seconds that one may wait for a slot.
    """

    def __init__(self, *, workers: Mapping[str, Worker], gate: Gate, router: Router, patience_s: float) -> None:
        self.line = Line(self._look)
        self._workers = workers
        self._gate = gate
        self._router = router
        self._patience_s = patience_s
        self._traffic: set[str] = set()  # ids of the workers that are ACTIVE
        gate.subscribe(self._gate_changed)

    def __repr__(self) -> str:
        return f"<Slots in_traffic={len(self._traffic)} line={len(self.line)}>"

    @property
    def in_traffic(self) -> int:
        """How many workers get traffic."""
        return len(self._traffic)

    # -- the fleet -------------------------------------------------------------------------------------------

    def count(self, worker: Worker) -> None:
        """A worker came, or its state changed."""
        if worker.state is WorkerState.ACTIVE and self._workers.get(worker.worker_id) is worker:
            self._traffic.add(worker.worker_id)
        else:
            self._traffic.discard(worker.worker_id)

    def gone(self, worker_id: str) -> None:
        """A worker is not in the fleet any more."""
        self._traffic.discard(worker_id)

    def changed(self, worker: Worker | None) -> None:
        """This worker may have more slots than it had, or less to do; None: any may."""
        if worker is None:
            self._router.forget()
            self._look()
        else:
            self._router.note(worker)
            self._wake(worker, worker.free)

    def given_back(self, worker: Worker) -> None:
        """One of its slots is free again, unless it has more than it may, or may not send now."""
        self._router.note(worker)
        self._wake(worker, 1)

    # -- who waits -------------------------------------------------------------------------------------------

    async def claim(self, sample: Sample, lane: Lane, avoid: frozenset[str], deadline: float) -> Worker:
        """Return a worker with a free slot; the caller takes the slot before its next await.

        Args:
            sample: who asks.
            lane: of which lane.
            avoid: ids of workers to take only when no other accepts.
            deadline: loop time.

        Raises:
            Interrupted: the gate is closed.
            NoWorker: none is in traffic, or none had a slot by the deadline.
        """
        since, called = deadline - self._patience_s, False
        try:
            while (worker := self._choose(sample, lane, avoid, deadline, called=called)) is None:
                called = await self.line.wait(sample.sample_id, lane, since, deadline, again=called)
        except (Interrupted, NoWorker):
            if called:
                self._look()  # the slot it was woken for is another's
            raise
        return worker

    def _choose(
        self, sample: Sample, lane: Lane, avoid: frozenset[str], deadline: float, *, called: bool
    ) -> Worker | None:
        """A worker with a free slot, if it is this one's turn; raises where there is nothing to wait for."""
        if not self._gate.is_open(lane):
            raise Interrupted("the gate is closed: nothing is dispatched")
        if called or not self.line:
            worker = self._router.choose(self._workers, sample.group_id, avoid)
            if worker is not None:
                return worker
        if not self._traffic:
            raise NoWorker("no worker is in traffic")
        if asyncio.get_running_loop().time() >= deadline:
            raise NoWorker(f"no slot was free in {self._patience_s:g} s")
        return None

    def _look(self) -> None:
        """Wake as many as there are free slots; all of them when no worker is left, so that they can say so."""
        if not self.line:
            return
        if not self._traffic:
            self.line.wake_all()
        elif self._router.knows_one(self._workers):  # where the fleet is full, nobody is asked
            wanted, free = self.line.looking, 0
            for worker in self._workers.values():
                free += worker.free
                if free >= wanted:
                    break
            self.line.wake(free)

    def _wake(self, worker: Worker, number: int) -> None:
        """Wake as many more as this worker may have slots more than it had."""
        if self.line:
            if not self._traffic:
                self.line.wake_all()
            elif worker.accepts:
                self.line.wake_more(number)

    def _gate_changed(self, lane: Lane) -> None:
        if not self._gate.is_open(lane):
            self.line.turn_away(lane)
