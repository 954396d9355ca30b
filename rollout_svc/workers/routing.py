"""Which worker takes the next request: pure.

Invariant: a worker that does not accept is never chosen; among those that do, the least loaded is, and the one
that just failed this sample only when there is no other.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout_svc.workers.worker import Worker

__all__ = ["choose"]


def choose(workers: Iterable[Worker], avoid: frozenset[str] = frozenset()) -> Worker | None:
    """Return the worker to send to, or None when none accepts now."""
    best: Worker | None = None
    best_rank: tuple[bool, float, int] | None = None
    for worker in workers:
        if not worker.accepts:
            continue
        rank = (worker.worker_id in avoid, worker.load, worker.answered)
        if best_rank is None or rank < best_rank:
            best, best_rank = worker, rank
    return best
