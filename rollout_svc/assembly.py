"""The parts of a service, made in the order they need each other.

Invariants:

- `prepare` does everything that can be wrong with a configuration, before a loop, a socket or a task exists.
- `assemble` wires and starts nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from rollout_svc.batches import Batches, Shortage
from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Storage
from rollout_svc.config import Config, WorkerConfig
from rollout_svc.engines import Endpoint, Transport, candidates
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.events import EventBus
from rollout_svc.gate import Gate, Lane
from rollout_svc.judging import Judging, ProcessRunner
from rollout_svc.launching import launch_problems
from rollout_svc.ledger import Ledger
from rollout_svc.limits import raise_open_file_limit
from rollout_svc.outside import Outside
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.draining import Draining
from rollout_svc.pause.ladder import Ladder
from rollout_svc.plan import Plan, batch_of, make_plan
from rollout_svc.producer.loop import Producer
from rollout_svc.producer.sources import PromptSource, make_source
from rollout_svc.rollout.member import Tools
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime, make_runtimes
from rollout_svc.rollout.tally import Tally
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import OnDeath, TaskOwner
from rollout_svc.tokens import Refused, TextCodec, load_tokenizer, refused_content
from rollout_svc.weights.fleet import Fleet
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.absence import Attendance
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.control import Control
from rollout_svc.workers.freezing import Freezing
from rollout_svc.workers.launching import Launching
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.routing import Router
from rollout_svc.workers.supervisor import Supervisor
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["Parts", "Prepared", "assemble", "make_worker", "prepare", "worker_ids"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that was found to work."""

    config: Config
    runtimes: dict[str, TaskRuntime]
    sources: dict[str, PromptSource]
    codec: TextCodec
    plan: Plan


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a running service is made of."""

    gate: Gate
    tasks: TaskOwner
    transport: Transport
    storage: Storage
    processes: ProcessRunner
    ledger: Ledger
    tally: Tally
    buffer: ReplayBuffer
    pool: WorkerPool
    judging: Judging
    rollouts: Rollouts
    producer: Producer
    fleet: Fleet
    updater: WeightUpdater
    supervisor: Supervisor
    launching: Launching
    attendance: Attendance
    pauses: PauseController
    batches: Batches


def worker_ids(config: Config) -> list[str]:
    """The ids of the configured workers, in order."""
    return [f"w{index}" for index in range(len(config.workers))]


def prepare(config: Config) -> Prepared:
    """Make what can be made, and checked, without a loop; reads prompt files and tokenizers.

    Raises:
        ConfigError: with every problem that was found.
    """
    problems: list[Problem] = []
    runtimes: dict[str, TaskRuntime] = {}
    sources: dict[str, PromptSource] = {}
    tokenizer = None
    refused: Refused = {}
    try:
        runtimes = make_runtimes(config)
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
    except ConfigError as error:
        problems.extend(error.problems)
    else:
        refused = refused_content(tokenizer)
    for index, task in enumerate(config.tasks):
        try:
            sources[task.name] = make_source(task.prompts, refused=refused, where=f"tasks.{index}.prompts")
        except ConfigError as error:
            problems.extend(error.problems)
    for index, worker in enumerate(config.workers):
        if worker.launch is not None:
            problems += launch_problems(worker.launch, f"workers.{index}.launch")
    problems += _lost_on_the_way(config)
    if problems:
        raise ConfigError(problems)
    batches = (batch_of(w.max_batch, len(w.behind), config.trainer) for w in config.workers)
    plan = make_plan(config.trainer, dict(zip(worker_ids(config), batches, strict=True)))
    raise_open_file_limit(plan)
    return Prepared(config, runtimes, sources, TextCodec(tokenizer), plan)


def _lost_on_the_way(config: Config) -> list[Problem]:
    """Sampling settings that a router would drop without a word: known before anybody is asked."""
    return [
        Problem(f"tasks.{number}.sampling.{said.partition(':')[0]}", f"{worker.url}:{said.partition(':')[2]}")
        for worker in config.workers
        if worker.behind
        for number, task in enumerate(config.tasks)
        if (said := RoutedSGLang().refuses(task.sampling)) is not None
    ]


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


def assemble(
    prepared: Prepared,
    *,
    bus: EventBus,
    rng: Random,
    on_death: OnDeath,
    hopeless: Callable[[int], bool],
    shortage: Callable[[int], Shortage],
    outside: Outside,
) -> Parts:
    """Wire the parts; needs a running loop, which the HTTP sessions will belong to."""
    config = prepared.config
    gate = Gate(is_open=False)
    signals = GateSignals(gate)
    tasks = TaskOwner(on_death)
    transport, storage, processes = outside.transport(), outside.storage(), outside.processes()
    ledger, tally, buffer = Ledger(), Tally(), ReplayBuffer()
    control = Control(transport)
    pool = WorkerPool(
        gate=gate,
        signals=signals,
        transport=transport,
        control=control,
        tasks=tasks,
        bus=bus,
        rng=rng,
        new_id=outside.new_id,
        request_timeout_s=config.request_timeout_s,
        router=Router(config.routing),
    )
    judging = Judging(gate=gate, tasks=tasks, processes=processes)
    for runtime in prepared.runtimes.values():
        judging.add_desk(runtime.desk)
    tools = Tools(
        gate=gate,
        signals=signals,
        engines=pool,
        judging=judging,
        storage=storage,
        tasks=tasks,
        bus=bus,
        codec=prepared.codec,
        tally=tally,
        max_attempts=config.producer.max_attempts,
    )
    rollouts = Rollouts(tools=tools, buffer=buffer)
    producer = Producer(
        gate=gate,
        pool=pool,
        rollouts=rollouts,
        buffer=buffer,
        ledger=ledger,
        bus=bus,
        codec=prepared.codec,
        tally=tally,
        runtimes=prepared.runtimes,
        sources=prepared.sources,
        group_size=config.trainer.prompt_repeat_k,
        new_id=outside.new_id,
    )
    fleet = Fleet(
        control=control,
        initial_version=config.trainer.initial_version,
        update_timeout_s=config.request_timeout_s,
    )
    freezing = Freezing(pool=pool, control=control, tasks=tasks)
    supervisor = Supervisor(
        pool=pool,
        freezing=freezing,
        control=control,
        transport=transport,
        tasks=tasks,
        admit=fleet.admit,
        quarantine_s=config.pause.quarantine_s,
        new_id=outside.new_id,
    )
    launching = Launching(pool=pool, supervisor=supervisor, launcher=outside.launcher(), tasks=tasks, bus=bus, rng=rng)
    ladder = Ladder(
        gate=gate,
        pool=pool,
        rollouts=rollouts,
        judging=judging,
        draining=Draining(
            pool=pool,
            freezing=freezing,
            control=control,
            supervisor=supervisor,
            tasks=tasks,
            abort_interval_s=config.pause.abort_interval_s,
        ),
        tasks=tasks,
        bus=bus,
    )
    pauses = PauseController(
        gate=gate, ladder=ladder, freezing=freezing, rollouts=rollouts, tasks=tasks, bus=bus, ledger=ledger.as_json
    )
    batches = Batches(
        buffer=buffer,
        tally=tally,
        bus=bus,
        lease_s=config.buffer.lease_s,
        max_staleness=config.trainer.max_staleness,
        version=lambda: fleet.version,
        hopeless=hopeless,
        shortage=shortage,
        paused_s=lambda: pauses.paused_s,
        on_ahead=producer.wake,
        new_id=outside.new_id,
    )
    attendance = Attendance(
        pool=pool,
        gate=gate,
        limit_s=config.producer.no_worker_timeout_s,
        on_end=lambda error: on_death("workers", error, True),
    )

    def gate_changed(_: Lane) -> None:
        producer.wake()
        attendance.look()

    gate.subscribe(gate_changed)

    producer.doomed = lambda: batches.ahead

    def fleet_changed() -> None:
        producer.wake()
        batches.wake()
        attendance.look()

    pool.on_fleet = fleet_changed
    rollouts.on_room = producer.room
    buffer.subscribe(producer.wake)
    return Parts(
        gate=gate,
        tasks=tasks,
        transport=transport,
        storage=storage,
        processes=processes,
        ledger=ledger,
        tally=tally,
        buffer=buffer,
        pool=pool,
        judging=judging,
        rollouts=rollouts,
        producer=producer,
        fleet=fleet,
        updater=WeightUpdater(fleet=fleet, pool=pool, tasks=tasks, bus=bus),
        supervisor=supervisor,
        launching=launching,
        attendance=attendance,
        pauses=pauses,
        batches=batches,
    )
