"""The parts of a service, made in the order they need each other.

Invariant: `assemble` wires and starts nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rollout_svc.assembly.fleet import FleetParts
from rollout_svc.assembly.ground import Ground
from rollout_svc.assembly.prepared import Prepared
from rollout_svc.batch import Shortage
from rollout_svc.batches import Batches
from rollout_svc.buffer.checkpoints import Checkpoints, Snapshots
from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Storage
from rollout_svc.engines import Transport
from rollout_svc.evaluations.evaluations import Evaluations, apart
from rollout_svc.events import EventBus
from rollout_svc.feasible import partials_usable
from rollout_svc.gate import Gate, Lane
from rollout_svc.judging import Judging, ProcessRunner
from rollout_svc.ledger import Ledger
from rollout_svc.outside import Outside
from rollout_svc.pause.controller import PauseController
from rollout_svc.pause.draining import Draining
from rollout_svc.pause.ladder import Ladder
from rollout_svc.pause.offloading import Offloading
from rollout_svc.producer.drought import Droughts
from rollout_svc.producer.loop import Producer
from rollout_svc.producer.tail import Tail
from rollout_svc.rollout.member import Tools
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.tally import Tally
from rollout_svc.sessions.registry import Sessions
from rollout_svc.tasks import OnDeath, TaskOwner
from rollout_svc.tensors import Handles, Store
from rollout_svc.trajectories import Trajectories
from rollout_svc.weights.fleet import Fleet
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.absence import Attendance
from rollout_svc.workers.experts import ExpertsDesk
from rollout_svc.workers.launching import Launching
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.supervisor import Supervisor

__all__ = ["Parts", "assemble"]


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
    offloading: Offloading
    batches: Batches
    evaluations: Evaluations
    checkpoints: Checkpoints
    sessions: Sessions

    async def abandon(self) -> None:
        """Close what is open of parts that nobody has used."""
        self.rollouts.let_go("a service that never began")
        opened = (self.transport, self.processes, self.tool_processes, self.storage, self.experts)
        await asyncio.gather(*(part.close() for part in opened))


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
    address: Callable[[], str | None] = lambda: None,
) -> Parts:
    """Wire the parts; needs a running loop, which the HTTP sessions will belong to."""
    ground = Ground(prepared.config, bus, rng, on_death, outside, storage, store)
    ground.sessions.address = address
    fleet = FleetParts(ground)
    work = _WorkParts(ground, fleet, prepared)
    stop = _StopParts(ground, fleet, work)
    batches = _batches(ground, fleet, work, stop, hopeless, shortage)
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
        offloading=stop.offloading,
        batches=batches,
        evaluations=work.evaluations,
        checkpoints=checkpoints,
        sessions=ground.sessions,
    )


def _batches(
    ground: Ground,
    fleet: FleetParts,
    work: _WorkParts,
    stop: _StopParts,
    hopeless: Callable[[int], bool],
    shortage: Callable[[int], Shortage],
) -> Batches:
    """What is handed over; see `Batches`."""
    config = ground.config
    return Batches(
        buffer=ground.buffer,
        tally=ground.tally,
        bus=ground.bus,
        storage=ground.storage,
        settling=ground.settling,
        mixture=work.producer.mixture,
        lease_s=config.buffer.lease_s,
        max_staleness=config.trainer.max_staleness,
        max_token_staleness=config.trainer.max_token_staleness,
        version=lambda: fleet.fleet.version,
        hopeless=hopeless,
        shortage=shortage,
        paused_s=lambda: stop.pauses.paused_s,
        on_demand=work.producer.wake,
        new_id=ground.outside.new_id,
    )


class _WorkParts:
    """Groups: admitted, generated, judged."""

    def __init__(self, ground: Ground, fleet: FleetParts, prepared: Prepared) -> None:
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
            sessions=ground.sessions,
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

    def __init__(self, ground: Ground, fleet: FleetParts, work: _WorkParts) -> None:
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
        self.offloading = Offloading(
            pool=fleet.pool, sleeping=fleet.sleeping, tasks=tasks, drained=lambda: self.pauses.drained
        )
        self.attendance = Attendance(
            pool=fleet.pool,
            gate=gate,
            limit_s=config.producer.no_worker_timeout_s,
            on_end=lambda error: ground.on_death("workers", error, True),
        )


def _connect(ground: Ground, fleet: FleetParts, work: _WorkParts, stop: _StopParts, batches: Batches) -> None:
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
