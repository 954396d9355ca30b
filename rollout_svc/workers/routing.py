"""Which worker takes the next request: pure policies, and the little that two of them remember.

Invariants:

- A worker that does not accept is never chosen; the one that just failed this sample only when there is no other.
- Load is tokens in flight over the limit: a worker that runs twice the requests is given twice the tokens.
- What is remembered is bounded, and is a preference only: forgetting it costs a cache, never a request.
- A policy is a function of the whole fleet; the router finds the same without looking at all of it (`standings.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from rollout_svc.config import Routing
from rollout_svc.workers.standings import Rank, Standings
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Router", "group_affinity", "least_tokens", "round_robin"]

HOMES: Final = 8192  # groups whose worker is remembered: more than are under way, in a megabyte or two


def least_tokens(workers: Iterable[Worker], avoid: frozenset[str] = frozenset()) -> Worker | None:
    """Return the worker with the fewest tokens in flight for its limit; of equals, who has answered least so far.

    Args:
        workers: the fleet.
        avoid: ids of workers to take only when no other accepts.
    """
    best: Worker | None = None
    best_rank: tuple[bool, float, int] | None = None
    for worker in workers:
        if not worker.accepts:
            continue
        rank = (worker.worker_id in avoid, worker.tokens / worker.limit, worker.answered)
        if best_rank is None or rank < best_rank:
            best, best_rank = worker, rank
    return best


def group_affinity(
    workers: Iterable[Worker], avoid: frozenset[str] = frozenset(), home: Worker | None = None
) -> Worker | None:
    """Return `home`, where this group's prefix is cached, while it accepts, else as `least_tokens` does.

    Args:
        workers: the fleet.
        avoid: ids of workers to take only when no other accepts.
        home: where the group's first request went; None for the first itself.
    """
    if home is not None and home.worker_id not in avoid and home.accepts:
        return home
    return least_tokens(workers, avoid)


def round_robin(workers: Iterable[Worker], avoid: frozenset[str] = frozenset()) -> Worker | None:
    """Return the worker whose last turn is the longest ago, and mark nothing; a new one has never had a turn.

    Turns instead of a place in a list, so that workers may come, go and rest without anyone losing theirs.

    Args:
        workers: the fleet.
        avoid: ids of workers to take only when no other accepts.
    """
    best: Worker | None = None
    best_rank: tuple[bool, int] | None = None
    for worker in workers:
        if worker.accepts:
            rank = (worker.worker_id in avoid, worker.turn)
            if best_rank is None or rank < best_rank:
                best, best_rank = worker, rank
    return best


class Router:
    """The policy in force."""

    __slots__ = ("_homes", "_standings", "_turns", "policy")

    def __init__(self, policy: Routing = "least_tokens") -> None:
        self.policy: Routing = policy
        self._homes: dict[str, str] = {}
        self._turns = 0
        self._standings = Standings(_by_turn if policy == "round_robin" else _by_load)

    def __repr__(self) -> str:
        return f"<Router {self.policy} homes={len(self._homes)} turns={self._turns}>"

    def note(self, worker: Worker) -> None:
        """This worker has less to do than it had, or accepts again."""
        self._standings.note(worker)

    def forget(self) -> None:
        """Anything in the fleet may have changed."""
        self._standings.forget()

    def knows_one(self, workers: Mapping[str, Worker]) -> bool:
        """Whether some worker accepts, as far as was said; what nobody said is found out in time."""
        return self._standings.best(workers, frozenset()) is not None

    def choose(self, workers: Mapping[str, Worker], group_id: str, avoid: frozenset[str]) -> Worker | None:
        """Return the worker to send to, which the caller does in the same step; None when none accepts now.

        Args:
            workers: the fleet by id.
            group_id: whose request it is.
            avoid: ids of workers to take only when no other accepts.
        """
        if self.policy == "least_tokens":
            return self._standings.best(workers, avoid)
        if self.policy == "round_robin":
            worker = self._standings.best(workers, avoid)
            if worker is not None:
                self._turns += 1
                worker.turn = self._turns
            return worker
        home = workers.get(self._homes.get(group_id, ""))
        at_home = home is not None and home.worker_id not in avoid and home.accepts
        worker = home if at_home else self._standings.best(workers, avoid)
        # A home that is only full stays one; where it is gone or out of traffic, its cache is as good as gone too.
        if worker is not None and (home is None or home.state is not WorkerState.ACTIVE):
            self._remember(group_id, worker)
        return worker

    def _remember(self, group_id: str, worker: Worker) -> None:
        self._homes.pop(group_id, None)
        self._homes[group_id] = worker.worker_id
        if len(self._homes) > HOMES:
            del self._homes[next(iter(self._homes))]


def _by_load(worker: Worker) -> Rank:
    return worker.tokens / worker.limit, worker.answered


def _by_turn(worker: Worker) -> Rank:
    return worker.turn, 0
