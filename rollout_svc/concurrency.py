"""The plan in force: from the trainer's config and the fleet as it is, to limits and the producer's target.

Invariant: the plan, the workers' limits and the producer's target change together, in one step, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any
from urllib.parse import urlsplit

from rollout_svc.assembly import Parts, make_worker
from rollout_svc.config import TrainerConfig, WorkerConfig
from rollout_svc.errors import Conflict, NotFound
from rollout_svc.launching import LaunchFailed
from rollout_svc.limits import raise_open_file_limit
from rollout_svc.plan import Plan, make_plan
from rollout_svc.workers.worker import WorkerState

__all__ = ["Concurrency"]


class Concurrency:
    """Owns the trainer's settings, limits set by hand, and the fleet's membership."""

    def __init__(self, *, parts: Parts, trainer: TrainerConfig, plan: Plan, rng: Random) -> None:
        self.trainer = trainer
        self.plan = plan
        self._limits: dict[str, int] = {}
        self._parts = parts
        self._rng = rng
        self._next_worker = 0

    def set(self, trainer: Mapping[str, Any], limits: Mapping[str, int]) -> Plan:
        """Follow other settings; keys that are not given stay.

        Raises:
            ValidationError: a value is out of bounds (pydantic); nothing has changed.
            ConfigError: the plan is impossible; nothing has changed.
        """
        merged = TrainerConfig.model_validate(self.trainer.model_dump() | dict(trainer))
        plan = make_plan(merged, self._max_batches(), self._limits | dict(limits))
        raise_open_file_limit(plan)
        self.trainer = merged
        self._limits |= limits
        self._parts.batches.max_staleness = merged.max_staleness
        self._follow(plan)
        return plan

    def add(self, config: WorkerConfig) -> str:
        """Add an engine and follow the plan of the larger fleet; returns the new worker's id.

        Raises:
            Conflict: there is a worker at that url, or no port for another.
            ConfigError: the larger fleet's plan is impossible on this machine; nothing has changed.
        """
        pool = self._parts.pool
        url = config.url or self._place(config)
        if any(_address(worker.endpoint.url) == _address(url) for worker in pool.workers.values()):
            raise Conflict(f"there is a worker at {url} already", type="duplicate")
        worker_id = f"w{self._next_worker}"
        batches = self._max_batches() | {worker_id: config.max_batch}
        raise_open_file_limit(make_plan(self.trainer, batches, self._limits))
        self._next_worker += 1
        worker = make_worker(worker_id, config, url, pool, self._rng)
        pool.add(worker)
        self.replan()
        if config.launch is not None:
            self._parts.launching.keep(worker, config.launch)
        self._parts.supervisor.look_after(worker)
        return worker_id

    def _place(self, config: WorkerConfig) -> str:
        if config.launch is None:
            raise ValueError("a worker has a url, or is launched")
        try:
            return self._parts.launching.place(config.launch)
        except LaunchFailed as failure:
            raise Conflict(str(failure), type="no_port") from failure

    def remove(self, worker_id: str) -> None:
        """Drain an engine and follow the plan of the smaller fleet."""
        worker = self._parts.pool.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"no worker {worker_id!r}", detail={"workers": sorted(self._parts.pool.workers)})
        self._limits.pop(worker_id, None)
        worker.become(WorkerState.DRAINING, "removed")
        self.replan()

    def replan(self) -> None:
        """Follow the plan of the fleet as it is now."""
        self._follow(make_plan(self.trainer, self._max_batches(), self._limits))

    def _max_batches(self) -> dict[str, int | None]:
        workers = self._parts.pool.workers.values()
        return {w.worker_id: w.max_batch for w in workers if w.state is not WorkerState.DRAINING}

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        for worker in self._parts.pool.workers.values():
            worker.limit = plan.limit_of(worker.worker_id)
        self._parts.producer.set_plan(plan, self.trainer.prompt_repeat_k)
        self._parts.pool.fleet_changed()


def _address(url: str) -> str:
    """The url as far as it says which engine is meant: two workers on one engine would abort each other's requests."""
    parts = urlsplit(url.lower())
    host = "127.0.0.1" if parts.hostname in ("localhost", "::1") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port}{parts.path}"
