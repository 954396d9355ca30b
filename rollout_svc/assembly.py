"""The parts of a service, made in the order they need each other.

Invariants:

- `prepare` does everything that can be wrong with a configuration, before a loop, a socket or a task exists.
- `assemble` wires and starts nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rollout_svc.batches import Batches, Shortage
from rollout_svc.buffer.checkpoints import Checkpoints, Snapshots
from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Storage
from rollout_svc.config import Config
from rollout_svc.engines import Transport
from rollout_svc.engines.router import RoutedSGLang
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.evaluations.evaluations import Evaluations, apart
from rollout_svc.events import EventBus
from rollout_svc.feasible import infeasible, partials_usable, remarks
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
from rollout_svc.producer.drought import Droughts
from rollout_svc.producer.loop import Producer
from rollout_svc.producer.sources import PromptSource, make_source
from rollout_svc.producer.tail import Tail
from rollout_svc.rollout.member import Tools
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime, make_runtimes
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import OnDeath, TaskOwner
from rollout_svc.tensors import Handles, Store
from rollout_svc.tokens import Refused, TextCodec, load_tokenizer, refused_content
from rollout_svc.trajectories import Trajectories, trajectory_problems
from rollout_svc.weights.fleet import Fleet
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.staging import Staging
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.absence import Attendance
from rollout_svc.workers.control import Control
from rollout_svc.workers.experts import ExpertsDesk
from rollout_svc.workers.freezing import Freezing
from rollout_svc.workers.launching import Launching
from rollout_svc.workers.making import make_worker
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.routing import Router
from rollout_svc.workers.supervisor import Supervisor

__all__ = ["Parts", "Prepared", "assemble", "make_worker", "prepare", "worker_ids"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that was found to work."""

    config: Config
    runtimes: dict[str, TaskRuntime]
    sources: dict[str, PromptSource]
    codec: TextCodec
    plan: Plan
    refused: Refused


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a running service is made of."""

    gate: Gate
    tasks: TaskOwner
    transport: Transport
    storage: Storage
    processes: ProcessRunner
    tool_processes: ProcessRunner
    handles: Handles
    experts: ExpertsDesk
    ledger: Ledger
    tally: Tally
    buffer: ReplayBuffer
    trajectories: Trajectories
    pool: WorkerPool
    judging: Judging
    rollouts: Rollouts
    producer: Producer
    droughts: Droughts
    fleet: Fleet
    updater: WeightUpdater
    supervisor: Supervisor
    launching: Launching
    attendance: Attendance
    pauses: PauseController
    batches: Batches
    evaluations: Evaluations
    checkpoints: Checkpoints

    async def abandon(self) -> None:
        """Close what is open of parts that nobody has used."""
        self.rollouts.let_go("a service that never began")
        opened = (self.transport, self.processes, self.tool_processes, self.storage, self.experts)
        await asyncio.gather(*(part.close() for part in opened))


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
    others = {f"tasks.{index}.prompts.jsonl": task.prompts.jsonl for index, task in enumerate(config.tasks)}
    problems += trajectory_problems(config.trajectories, others | {"buffer.path": config.buffer.path})
    problems += infeasible(config.trainer, config.producer, config.tasks)
    if problems:
        raise ConfigError(problems)
    batches = (batch_of(w.max_batch, len(w.behind), config.trainer) for w in config.workers)
    notes = remarks(config.trainer, config.producer.strategy, config.tasks)
    plan = make_plan(config.trainer, dict(zip(worker_ids(config), batches, strict=True)), notes=notes)
    raise_open_file_limit(plan)
    return Prepared(config, runtimes, sources, TextCodec(tokenizer), plan, refused)


def _lost_on_the_way(config: Config) -> list[Problem]:
    """Sampling settings that a router would drop without a word: known before anybody is asked."""
    return [
        Problem(f"tasks.{number}.sampling.{said.partition(':')[0]}", f"{worker.url}:{said.partition(':')[2]}")
        for worker in config.workers
        if worker.behind
        for number, task in enumerate(config.tasks)
        if (said := RoutedSGLang().refuses(task.sampling)) is not None
    ]


def assemble(
    prepared: Prepared,
    *,
    bus: EventBus,
    rng: Random,
    on_death: OnDeath,
    hopeless: Callable[[int], bool],
    shortage: Callable[[int], Shortage],
    outside: Outside,
    storage: Storage,
    store: Store,
) -> Parts:
    """Wire the parts; needs a running loop, which the HTTP sessions will belong to."""
    ground = _Ground(prepared.config, bus, rng, on_death, outside, storage, store)
    fleet = _FleetParts(ground)
    work = _WorkParts(ground, fleet, prepared)
    stop = _StopParts(ground, fleet, work)
    batches = Batches(
        buffer=ground.buffer,
        tally=ground.tally,
        bus=bus,
        storage=ground.storage,
        settling=ground.settling,
        mixture=work.producer.mixture,
        lease_s=prepared.config.buffer.lease_s,
        max_staleness=prepared.config.trainer.max_staleness,
        max_token_staleness=prepared.config.trainer.max_token_staleness,
        version=lambda: fleet.fleet.version,
        hopeless=hopeless,
        shortage=shortage,
        paused_s=lambda: stop.pauses.paused_s,
        on_demand=work.producer.wake,
        new_id=outside.new_id,
    )
    checkpoints = Checkpoints(
        tasks=ground.tasks,
        storage=storage if isinstance(storage, Snapshots) else None,
        acknowledge=batches.acknowledge_all,
    )
    _connect(ground, fleet, work, stop, batches)
    return Parts(
        gate=ground.gate,
        tasks=ground.tasks,
        transport=ground.transport,
        storage=ground.storage,
        processes=ground.processes,
        tool_processes=ground.tool_processes,
        handles=ground.handles,
        experts=ground.experts,
        ledger=ground.ledger,
        tally=ground.tally,
        buffer=ground.buffer,
        trajectories=ground.trajectories,
        pool=fleet.pool,
        judging=work.judging,
        rollouts=work.rollouts,
        producer=work.producer,
        droughts=work.droughts,
        fleet=fleet.fleet,
        updater=fleet.updater,
        supervisor=fleet.supervisor,
        launching=fleet.launching,
        attendance=stop.attendance,
        pauses=stop.pauses,
        batches=batches,
        evaluations=work.evaluations,
        checkpoints=checkpoints,
    )


class _Ground:
    """What everything else stands on."""

    def __init__(
        self,
        config: Config,
        bus: EventBus,
        rng: Random,
        on_death: OnDeath,
        outside: Outside,
        storage: Storage,
        store: Store,
    ) -> None:
        self.config, self.bus, self.rng, self.on_death, self.outside = config, bus, rng, on_death, outside
        self.gate = Gate(is_open=False)
        self.signals = GateSignals(self.gate)
        self.tasks = TaskOwner(on_death)
        self.transport = outside.transport()
        self.storage = storage
        self.processes, self.tool_processes = outside.processes(), outside.tools()
        self.handles = Handles(debug=config.memory.debug)
        self.experts = ExpertsDesk(config.experts, self.handles, store, outside.threads(), self.tasks, bus)
        self.ledger, self.tally, self.buffer = Ledger(), Tally(), ReplayBuffer(config.buffer.max_bytes)
        self.settling = Settling(tally=self.tally, bus=bus, storage=self.storage)
        self.trajectories = Trajectories(config.trajectories, bus=bus)


class _FleetParts:
    """Engines: reached, watched, launched, given weights."""

    def __init__(self, ground: _Ground) -> None:
        config, tasks, bus = ground.config, ground.tasks, ground.bus
        self.control = Control(ground.transport)
        self.pool = WorkerPool(
            gate=ground.gate,
            signals=ground.signals,
            transport=ground.transport,
            control=self.control,
            tasks=tasks,
            bus=bus,
            rng=ground.rng,
            new_id=ground.outside.new_id,
            request_timeout_s=config.request_timeout_s,
            router=Router(config.routing),
            experts=ground.experts,
        )
        self.fleet = Fleet(
            control=self.control,
            initial_version=config.trainer.initial_version,
            update_timeout_s=config.request_timeout_s,
        )
        self.freezing = Freezing(pool=self.pool, control=self.control, tasks=tasks)
        self.supervisor = Supervisor(
            pool=self.pool,
            freezing=self.freezing,
            control=self.control,
            transport=ground.transport,
            tasks=tasks,
            admit=self.fleet.admit,
            quarantine_s=config.pause.quarantine_s,
            new_id=ground.outside.new_id,
        )
        self.launching = Launching(
            pool=self.pool,
            supervisor=self.supervisor,
            launcher=ground.outside.launcher(),
            groups=ground.outside.groups(config.experts.ray_address),
            tasks=tasks,
            bus=bus,
            rng=ground.rng,
        )
        presence = Presence(self.pool, tasks)
        staging = Staging(ground.transport, self.control, presence, config.request_timeout_s)
        self.updater = WeightUpdater(fleet=self.fleet, pool=self.pool, bus=bus, presence=presence, staging=staging)


class _WorkParts:
    """Groups: admitted, generated, judged."""

    def __init__(self, ground: _Ground, fleet: _FleetParts, prepared: Prepared) -> None:
        self.judging = Judging(gate=ground.gate, tasks=ground.tasks, processes=ground.processes)
        for runtime in prepared.runtimes.values():
            self.judging.add_desk(runtime.desk)
        tools = Tools(
            gate=ground.gate,
            signals=ground.signals,
            engines=fleet.pool,
            judging=self.judging,
            storage=ground.storage,
            tasks=ground.tasks,
            bus=ground.bus,
            codec=prepared.codec,
            tally=ground.tally,
            settling=ground.settling,
            trajectories=ground.trajectories,
            max_attempts=ground.config.producer.max_attempts,
            processes=ground.tool_processes,
            experts=ground.config.experts.enabled,
        )
        self.droughts = Droughts(prepared.runtimes, ground.bus)
        self.rollouts = Rollouts(tools=tools, buffer=ground.buffer)
        self.rollouts.partials_usable = partials_usable(ground.config.trainer, ground.config.producer.strategy)
        config = ground.config.producer
        self.tail = Tail(config.tail_batch_size, config.tail_after_aborts)
        ground.settling.again = self.tail.again
        self.evaluations = Evaluations(
            rollouts=self.rollouts,
            tools=apart(tools),
            pool=fleet.pool,
            gate=ground.gate,
            runtimes=prepared.runtimes,
            refused=prepared.refused,
            bus=ground.bus,
            version=lambda: fleet.fleet.version,
            limit=ground.config.evaluation.max_in_flight,
            new_id=ground.outside.new_id,
        )
        self.producer = Producer(
            gate=ground.gate,
            pool=fleet.pool,
            rollouts=self.rollouts,
            buffer=ground.buffer,
            ledger=ground.ledger,
            bus=ground.bus,
            codec=prepared.codec,
            tally=ground.tally,
            storage=ground.storage,
            settling=ground.settling,
            runtimes=prepared.runtimes,
            sources=prepared.sources,
            strategy=config.strategy,
            tail=self.tail,
            new_id=ground.outside.new_id,
        )


class _StopParts:
    """Pauses, and who notices that nobody is left to work."""

    def __init__(self, ground: _Ground, fleet: _FleetParts, work: _WorkParts) -> None:
        config, gate, tasks = ground.config, ground.gate, ground.tasks
        draining = Draining(
            pool=fleet.pool,
            freezing=fleet.freezing,
            control=fleet.control,
            supervisor=fleet.supervisor,
            tasks=tasks,
            abort_interval_s=config.pause.abort_interval_s,
        )
        ladder = Ladder(
            gate=gate,
            pool=fleet.pool,
            rollouts=work.rollouts,
            judging=work.judging,
            draining=draining,
            tasks=tasks,
            bus=ground.bus,
        )
        self.pauses = PauseController(
            gate=gate,
            ladder=ladder,
            freezing=fleet.freezing,
            rollouts=work.rollouts,
            tasks=tasks,
            bus=ground.bus,
            ledger=ground.ledger.as_json,
        )
        self.attendance = Attendance(
            pool=fleet.pool,
            gate=gate,
            limit_s=config.producer.no_worker_timeout_s,
            on_end=lambda error: ground.on_death("workers", error, True),
        )


def _connect(ground: _Ground, fleet: _FleetParts, work: _WorkParts, stop: _StopParts, batches: Batches) -> None:
    """Tell each part of the changes in others that it has to look at."""
    producer, attendance = work.producer, stop.attendance

    def gate_changed(_: Lane) -> None:
        producer.wake()
        batches.wake()  # what is under way in a closed lane does not come: nobody waits for it
        attendance.look()

    def fleet_changed() -> None:
        producer.wake()
        batches.wake()
        work.evaluations.wake()
        attendance.look()

    ground.gate.subscribe(gate_changed)
    ground.buffer.subscribe(producer.wake)
    fleet.pool.on_fleet = fleet_changed
    work.rollouts.on_room = producer.room
    producer.demand = lambda: batches.demand
    fleet.fleet.on_version = ground.storage.versioned
    fleet.updater.on_updated = producer.weights_went_to
