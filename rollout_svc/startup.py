"""Waiting for engines that may still be loading.

Invariant: the wait ends with every engine reached, or with an error that names those that were not; meanwhile it says
every few seconds who is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from rollout_svc.assembly import Parts, worker_ids
from rollout_svc.config import Config
from rollout_svc.engines import EngineProfile
from rollout_svc.errors import ConfigError, Problem, RolloutError, WorkerFailure
from rollout_svc.events import EngineDoubted, EnginesLoading, EventBus
from rollout_svc.launching import taken_addresses
from rollout_svc.launching.cluster import cluster_problems
from rollout_svc.newcomers import Newcomers
from rollout_svc.preflight import complaints, doubts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = [
    "StartFailed",
    "StartTimeout",
    "guard_fleet",
    "refuse_taken",
    "refuse_unfit",
    "refuse_unreachable",
    "wait_for_engines",
]

_PROGRESS_S: Final = 5.0  # seconds between two words about engines that are still loading


class StartFailed(RolloutError):
    """Raised when a launched engine ended before it ever answered, and is not started again; quotes its log."""


class StartTimeout(StartFailed):
    """Raised when engines did not answer within `start_timeout_s`; names them."""


async def refuse_taken(config: Config) -> None:
    """Refuse to start where an engine could not listen, there is no cluster to run on, or one loop is not enough.

    Raises:
        ConfigError: a port is in use; no cluster answers at the address; or there are to be shards, and a service in
            process is one loop.
    """
    if config.producer.shards > 1:
        words = (
            "are made by `rollout-svc serve` and `rollout_svc.ray.start`: a service made like this is one event loop"
        )
        raise ConfigError.at("producer.shards", words)
    if any(worker.launch is not None for worker in config.workers):
        problems = [*await cluster_problems(config), *await asyncio.to_thread(taken_addresses, config)]
        if problems:
            raise ConfigError(problems)


async def wait_for_engines(pool: WorkerPool, bus: EventBus, timeout_s: float) -> None:
    """Return once no worker is STARTING.

    Raises:
        StartFailed: a launched engine is given up.
        StartTimeout: after `timeout_s`, naming the silent ones and what was last heard of them.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    unsubscribe = pool.subscribe(changed.set)
    started = loop.time()
    deadline = started + timeout_s
    try:
        while True:
            starting = [worker for worker in pool.workers.values() if worker.state is WorkerState.STARTING]
            over = [w for w in pool.workers.values() if w.launched is not None and w.launched.over]
            if over:
                raise StartFailed("\n".join(map(_told, over)))
            if not starting:
                return
            if loop.time() >= deadline:
                silent = "; ".join(f"{name} at {reason}" for name, reason in _silent(starting).items())
                raise StartTimeout(f"no answer within start_timeout_s = {timeout_s:g} s: {silent}")
            changed.clear()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _PROGRESS_S)):
                    await changed.wait()
            except TimeoutError:
                elapsed_s = round(loop.time() - started, 1)
                waiting = _silent(starting)
                bus.emit(EnginesLoading(waiting, len(pool.workers) - len(waiting), elapsed_s, timeout_s))
    finally:
        unsubscribe()


def refuse_unfit(config: Config, pool: WorkerPool, bus: EventBus) -> None:
    """Hold what the engines said they are against the settings, before anything is generated.

    Emits an `EngineDoubted` for what will work and should not be left so.

    Raises:
        ConfigError: everything that would fail, each line naming the worker and what it answered.
    """
    answers: dict[str, EngineProfile | WorkerFailure] = {}
    for worker_id in worker_ids(config):
        worker = pool.workers.get(worker_id)
        answer = None if worker is None else worker.refusal or worker.profile
        if answer is not None:
            answers[worker_id] = answer
    for doubt in doubts(config, answers):
        bus.emit(EngineDoubted(doubt.path, doubt.message))
    if problems := complaints(config, answers):
        raise ConfigError(problems)


def guard_fleet(config: Config, parts: Parts) -> None:
    """From now on let nobody in whom the start would have refused; one that was added meanwhile is taken out again."""
    newcomers = Newcomers(config, parts.pool.workers, lambda: parts.fleet.source is not None)
    for worker in list(parts.pool.workers.values()):
        if (words := newcomers.refuse(worker)) is not None:
            worker.turn_away(words)
    parts.supervisor.unfit = newcomers.refuse


def _silent(workers: Iterable[Worker]) -> dict[str, str]:
    """Where each of them is, and what was last heard of it."""
    return {worker.worker_id: f"{worker.endpoint.url}: {worker.reason}{_log_of(worker)}" for worker in workers}


def _log_of(worker: Worker) -> str:
    """Where to see how an engine gets on that we started."""
    return "" if worker.launched is None else worker.launched.where


def _told(worker: Worker) -> str:
    """Say what became of a launched engine, at its place in the configuration, and quote it."""
    words = worker.launched.last_words.splitlines() if worker.launched is not None else []
    return "\n".join([f"workers.{worker.worker_id[1:]}.launch: {worker.reason}", *(f"    {line}" for line in words)])


def refuse_unreachable(runtimes: Mapping[str, TaskRuntime], address: str | None) -> None:
    """Refuse agents that speak over HTTP in a service that serves none.

    Raises:
        ConfigError: at the task's agent.
    """
    if address is None:
        why = "its agents speak over HTTP, and none is served: use `rollout-svc serve`, or set service.public_url"
        problems = [
            Problem(f"tasks.{index}.agent", f"{why} (task {name!r})")
            for index, (name, runtime) in enumerate(runtimes.items())
            if getattr(runtime.agent, "needs_http", False)
        ]
        if problems:
            raise ConfigError(problems)
