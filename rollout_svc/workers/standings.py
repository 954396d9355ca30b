"""Workers in the order in which they take requests, found without looking at all of them.

Invariants:

- The best is the one that a look at the whole fleet would choose: by rank, at a tie the one that came first.
- A rank that became worse is seen when it is met; whoever makes one better, or lets a worker accept again, says so.
- What nobody said is found out all the same: the fleet is looked at afresh once in as many choices as it has workers.
- A choice costs the logarithm of the fleet, and there are never more entries than a few for each worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from rollout_svc.workers.worker import Worker

__all__ = ["Rank", "Standings"]

Rank = tuple[float, int]
"""Less is better."""

_ENTRIES: Final = 4  # of a worker, in the mean, before those that are out of date are dropped
_FEW: Final = 64  # entries that are no matter


class _Entry(NamedTuple):
    """A worker as it stood when it was entered; `number` tells two of one worker apart."""

    rank: Rank
    order: int
    number: int
    worker: Worker


class Standings:
    """See the module's invariants.

    Args:
        rank: of a worker that accepts.
    """

    __slots__ = ("_entered", "_heap", "_left", "_orders", "_rank", "_valid")

    def __init__(self, rank: Callable[[Worker], Rank]) -> None:
        self._rank = rank
        self._heap: list[_Entry] = []
        self._valid: dict[str, _Entry] = {}  # the one entry of a worker that counts
        self._orders: dict[str, int] = {}
        self._entered = 0
        self._left = 0  # choices until the fleet is looked at afresh

    def __repr__(self) -> str:
        return f"<Standings workers={len(self._valid)} entries={len(self._heap)}>"

    def __len__(self) -> int:
        """Entries, those included that are out of date."""
        return len(self._heap)

    def forget(self) -> None:
        """Anything may have changed: look at the whole fleet at the next choice."""
        self._left = 0

    def note(self, worker: Worker) -> None:
        """This worker's rank may be better than it was, or it accepts again."""
        if not worker.accepts:
            return
        known, rank = self._valid.get(worker.worker_id), self._rank(worker)
        if known is None or known.worker is not worker or rank < known.rank:
            self._enter(worker, rank)
            if len(self._heap) > _FEW + _ENTRIES * len(self._valid):
                self._heap = list(self._valid.values())
                heapq.heapify(self._heap)

    def best(self, workers: Mapping[str, Worker], avoid: frozenset[str]) -> Worker | None:
        """The worker of the least rank among those that accept; one to avoid only where there is no other.

        Args:
            workers: the fleet by id, in the order in which they came.
            avoid: ids of workers to take only when no other accepts.
        """
        if self._left <= 0:
            self._look(workers)
        self._left -= 1
        avoided: list[_Entry] = []
        found: Worker | None = None
        while found is None and (entry := self._top(workers)) is not None:
            if entry.worker.worker_id in avoid:
                avoided.append(heapq.heappop(self._heap))
            else:
                found = entry.worker
        for entry in avoided:
            heapq.heappush(self._heap, entry)
        return avoided[0].worker if found is None and avoided else found

    def _top(self, workers: Mapping[str, Worker]) -> _Entry | None:
        """The first entry that holds, with all before it dropped or put where they belong."""
        heap, valid = self._heap, self._valid
        while heap:
            entry = heap[0]
            worker = entry.worker
            if valid.get(worker.worker_id) is not entry:
                heapq.heappop(heap)
            elif workers.get(worker.worker_id) is not worker or not worker.accepts:
                heapq.heappop(heap)
                del valid[worker.worker_id]
            elif (rank := self._rank(worker)) != entry.rank:
                heapq.heappop(heap)
                self._enter(worker, rank)
            else:
                return entry
        return None

    def _enter(self, worker: Worker, rank: Rank) -> None:
        self._entered += 1
        order = self._orders.setdefault(worker.worker_id, len(self._orders))
        entry = self._valid[worker.worker_id] = _Entry(rank, order, self._entered, worker)
        heapq.heappush(self._heap, entry)

    def _look(self, workers: Mapping[str, Worker]) -> None:
        self._left = max(1, len(workers))
        self._orders = {worker_id: order for order, worker_id in enumerate(workers)}
        self._heap.clear()
        self._valid.clear()
        for worker in workers.values():
            if worker.accepts:
                self._enter(worker, self._rank(worker))
