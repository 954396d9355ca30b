"""Workers as a configuration describes them."""

from __future__ import annotations

from random import Random
from typing import Protocol

from rollout_svc.config import WorkerConfig
from rollout_svc.engines import Endpoint, candidates
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["StateListener", "make_worker"]


class StateListener(Protocol):
    """Is told when a worker changes its state: the pool."""

    def state_changed(self, worker: Worker, before: WorkerState, after: WorkerState, reason: str) -> None:
        """It has changed."""


def make_worker(worker_id: str, config: WorkerConfig, url: str, pool: StateListener, rng: Random) -> Worker:
    """Make the service's view of an engine."""
    return Worker(
        worker_id=worker_id,
        endpoint=Endpoint(url, config.api_key, config.admin_key),
        engines=tuple(Endpoint(engine, config.api_key, config.admin_key) for engine in config.behind),
        candidates=(RoutedSGLang(),) if config.behind else candidates(config.dialect),
        max_batch=config.max_batch,
        exclusive=config.exclusive,
        stream=config.stream,
        breaker=Breaker(rng),
        on_change=pool.state_changed,
    )
