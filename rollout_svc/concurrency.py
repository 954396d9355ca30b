"""The plan in force: from the trainer's config and the fleet as it is, to limits and the producer's target.

Invariant: the plan, the workers' limits and the producer's target change together, in one step, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from rollout_svc.assembly import Parts, make_worker
from rollout_svc.config import Config, TrainerConfig, WorkerConfig, address_of
from rollout_svc.errors import ConfigError, Conflict, NotFound
from rollout_svc.feasible import infeasible, partials_usable, remarks
from rollout_svc.launching import LaunchFailed
from rollout_svc.limits import raise_open_file_limit
from rollout_svc.plan import Plan, batch_of, make_plan
from rollout_svc.workers.worker import WorkerState

__all__ = ["Concurrency"]


class Concurrency:
    """Owns the trainer's settings, limits set by hand, and the fleet's membership."""

    def __init__(self, *, parts: Parts, config: Config, plan: Plan, rng: Random) -> None:
        self.trainer = config.trainer
        self._config = config
        self.plan = plan
        self._limits: dict[str, int] = {}
        self._parts = parts
        self._rng = rng
        self._next_worker = 0

    def set(self, trainer: Mapping[str, Any], limits: Mapping[str, int]) -> Plan:
        """Follow other settings; keys that are not given stay.

        Raises:
            ValidationError: a value is out of bounds (pydantic); nothing has changed.
            ConfigError: the plan is impossible, or settings do not go together; nothing has changed.
        """
        merged = TrainerConfig.model_validate(self.trainer.model_dump() | dict(trainer))
        problems = infeasible(merged, self._config.producer, self._config.tasks)
        if problems:
            raise ConfigError(problems)
        plan = self._plan(merged, self._max_batches(merged), self._limits | dict(limits))
        raise_open_file_limit(plan)
        self.trainer = merged
        self._limits |= limits
        self._parts.batches.max_staleness = merged.max_staleness
        self._parts.batches.max_token_staleness = merged.max_token_staleness
        self._follow(plan)
        return plan

    def add(self, config: WorkerConfig) -> str:
        """Add an engine and follow the plan of the larger fleet; returns the new worker's id.

        Raises:
            Conflict: there is a worker at that url, or no port for another.
            ConfigError: the larger fleet's plan is impossible on this machine; nothing has changed.
        """
        return self.add_all((config,))[0]

    def add_all(self, configs: Iterable[WorkerConfig]) -> list[str]:
        """Add engines and follow the plan of the larger fleet, made once for all of them; returns their ids.

        Raises:
            Conflict: there is a worker at a url, or no port for another; none was added.
            ConfigError: the larger fleet's plan is impossible on this machine; none was added.
        """
        pool = self._parts.pool
        taken = {address_of(place.url) for w in pool.workers.values() for place in (w.endpoint, *w.engines)}
        batches = self._max_batches(self.trainer)
        made: dict[str, tuple[WorkerConfig, str]] = {}
        for config in configs:
            url = config.url or self._place(config)
            for place in (url, *config.behind):
                if address_of(place) in taken:
                    raise Conflict(f"there is a worker at {place} already", type="duplicate")
                taken.add(address_of(place))
            worker_id = f"w{self._next_worker + len(made)}"
            batches[worker_id] = batch_of(config.max_batch, len(config.behind), self.trainer)
            made[worker_id] = config, url
        raise_open_file_limit(self._plan(self.trainer, batches, self._limits))
        self._next_worker += len(made)
        for worker_id, (config, url) in made.items():
            pool.add(make_worker(worker_id, config, url, pool, self._rng))
        self.replan()
        for worker_id, (config, _) in made.items():
            worker = pool.workers[worker_id]
            if config.launch is not None:
                self._parts.launching.keep(worker, config.launch)
            self._parts.supervisor.look_after(worker)
        return list(made)

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
        self._follow(self._plan(self.trainer, self._max_batches(self.trainer), self._limits))

    def _plan(self, trainer: TrainerConfig, batches: Mapping[str, int | None], limits: Mapping[str, int]) -> Plan:
        notes = remarks(trainer, self._config.producer.strategy, self._config.tasks)
        return make_plan(trainer, batches, limits, notes=notes)

    def _max_batches(self, trainer: TrainerConfig) -> dict[str, int | None]:
        workers = (w for w in self._parts.pool.workers.values() if w.state is not WorkerState.DRAINING)
        return {w.worker_id: batch_of(w.max_batch, len(w.engines), trainer) for w in workers}

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        for worker in self._parts.pool.workers.values():
            worker.limit = plan.limit_of(worker.worker_id)
        self._parts.rollouts.partials_usable = partials_usable(self.trainer, self._config.producer.strategy)
        self._parts.producer.follow(plan, self.trainer)
        self._parts.pool.fleet_changed()
