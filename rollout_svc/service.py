"""The service: its life, and the calls a trainer makes.

Invariants:

- A service that raised at start has started nothing; one that stopped holds no task, socket or process.
- Every public call either answers or raises a ServiceError; a service that failed says so at every call.
- A cancelled call leaves the service as it was: pauses, leases and updates are carried by tasks of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Literal, TypeVar

from rollout_svc.accounts import memory_record, watch_memory
from rollout_svc.assembly import Parts, Prepared, assemble, prepare
from rollout_svc.batch import Batch, Shortage
from rollout_svc.concurrency import Concurrency
from rollout_svc.config import WHOLE, Config, Portion, WorkerConfig
from rollout_svc.errors import ConfigError, NotNow, NotNowType
from rollout_svc.evaluations.evaluation import records_of
from rollout_svc.events import ComponentDied, EventBus
from rollout_svc.fleet_requests import add_one, refuse_newcomer, set_plan
from rollout_svc.gate import LANES, Lane
from rollout_svc.group import Group
from rollout_svc.observe.memory import MemorySampler
from rollout_svc.outside import Outside
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.request import Asked
from rollout_svc.pushing import push
from rollout_svc.recovery import Restore, keep_partials, open_storage, open_store, recall
from rollout_svc.shutdown import shut_down
from rollout_svc.startup import guard_fleet, refuse_taken, refuse_unfit, refuse_unreachable, wait_for_engines
from rollout_svc.status import OLDEST, describe, hopeless, shortage_of, whereabouts
from rollout_svc.stuck import describe_stuck, oldest_samples
from rollout_svc.weights.calls import WeightCalls
from rollout_svc.weights.pausing import PauseCalls
from rollout_svc.weights.request import read_source, read_version
from rollout_svc.workers.worker import WorkerState

__all__ = ["RolloutService", "State"]

State = Literal["starting", "running", "pausing", "paused", "resuming", "stopping", "failed"]

T = TypeVar("T")


class RolloutService:
    """The rollout stage, in process. All calls must be made in the loop `start` ran in."""

    def __init__(
        self,
        config: Config,
        *,
        bus: EventBus | None = None,
        rng: Random | None = None,
        outside: Outside | None = None,
        restore: Restore | None = None,
        portion: Portion | None = None,
    ) -> None:
        """Check the configuration; raises ConfigError with every problem, and starts nothing.

        Args:
            config: the settings.
            bus: where events go; None: nowhere.
            rng: source of jitter.
            outside: sockets, processes, storage, ids; None: the real ones, and storage that promises nothing.
            restore: a snapshot to go on from, where there is no journal at `buffer.path` yet.
            portion: of a shard: which prompts are its own; it is held, as if paused, until the first resume.
        """
        self.config = config
        self.bus = bus or EventBus()
        self.prepared: Prepared = prepare(config, portion or WHOLE)
        self._held = portion is not None
        self.failure: ComponentDied | None = None
        self._rng = rng or Random()
        self._outside = outside or Outside()
        self._restore = restore
        self._parts: Parts | None = None
        self._fleet: Concurrency | None = None
        self._phase: Literal["new", "starting", "running", "stopping", "stopped"] = "new"
        self.survivors: tuple[str, ...] = ()
        self._stopping: asyncio.Task[None] | None = None
        self._weights: WeightCalls | None = None
        self._pauses: PauseCalls | None = None
        self._memory: MemorySampler | None = None
        self.recovered: dict[str, int] = {}
        self.bound: str | None = None  # where its HTTP is served

    @property
    def parts(self) -> Parts:
        """The running parts."""
        return _made(self._parts)

    @property
    def fleet(self) -> Concurrency:
        """The fleet's membership and the plan in force."""
        return _made(self._fleet)

    @property
    def pauses(self) -> PauseCalls:
        """The calls that stop the stage, and start it again."""
        return _made(self._pauses)

    @property
    def weights(self) -> WeightCalls:
        """The calls that move weights."""
        return _made(self._weights)

    @property
    def memory_watch(self) -> MemorySampler:
        """The watch on memory and disk."""
        return _made(self._memory)

    @property
    def state(self) -> State:
        """Where the service stands."""
        if self.failure is not None:
            return "failed"
        if self._phase in ("stopping", "stopped"):
            return "stopping"
        if self._phase != "running":
            return "starting"
        state = self.parts.pauses.state
        return "resuming" if self.pauses.resuming and state == "paused" else state

    async def start(self) -> None:
        """Make the parts and begin to reach the engines; returns at once.

        Raises:
            ConfigError: an engine is to be launched at a port that is in use, or the journal at `buffer.path` cannot
                be used; nothing was started, and the file is as it was.
        """
        if self._phase != "new":
            return
        self._phase = "starting"
        try:
            await refuse_taken(self.config)
            storage = await open_storage(self.config, self._outside, self._restore, self.prepared.portion)
            store = await open_store(self.config, self._outside, storage)
        except ConfigError:
            self._phase = "stopped"
            raise
        parts = assemble(
            self.prepared,
            bus=self.bus,
            rng=self._rng,
            on_death=self._died,
            hopeless=self._hopeless,
            shortage=self._shortage,
            outside=self._outside,
            storage=storage,
            store=store,
            address=lambda: self.config.service.public_url or self.bound,
        )
        self.recovered = await recall(parts, self.prepared, self._died, self._outside.wall, store)
        if self.state != "starting":  # stopped meanwhile
            await parts.abandon()
            return
        self._parts = parts
        self._fleet = Concurrency(parts=parts, config=self.config, plan=self.prepared.plan, rng=self._rng)
        self._weights = WeightCalls(
            tasks=parts.tasks,
            pauses=parts.pauses,
            offloading=parts.offloading,
            updater=parts.updater,
            fleet=parts.fleet,
            pool=parts.pool,
            pause=self.pause,
            check=self._check_running,
            runs=lambda: self._phase == "running",
            config=self.config,
        )
        using = (parts.pauses, parts.offloading, parts.pool, parts.tasks)
        self._pauses = PauseCalls(*using, self.config.pause, self._weights, self._check_running)
        self._memory = watch_memory(parts, self.config, self.bus, probes=self._outside.probes)
        self._fleet.add_all(self.config.workers)
        parts.evaluations.oldest = lambda groups: oldest_samples(parts, OLDEST, among=groups)
        parts.tasks.spawn("producer", parts.producer.run(), critical=True)
        parts.tasks.spawn("evaluations", parts.evaluations.run(), critical=True)
        keep_partials(parts, self.config.journal.partial_interval_s)

    async def ready(self) -> None:
        """Wait until every configured engine has answered, then open the gate.

        Raises:
            StartFailed: a launched one ended before it ever answered, and is given up.
            StartTimeout: some did not answer within `start_timeout_s`; they are named.
            ConfigError: what is configured cannot work with what they answered; nothing was generated.
        """
        await wait_for_engines(self.parts.pool, self.bus, self.config.start_timeout_s)
        refuse_unfit(self.config, self.parts.pool, self.bus)
        refuse_unreachable(self.prepared.runtimes, self.parts.sessions.address())
        guard_fleet(self.config, self.parts)
        if self._phase == "starting":
            self._phase = "running"
            self.parts.pauses.hold() if self._held else self.parts.gate.open(LANES)

    async def stop(self) -> None:
        """Drain under the pause deadline, then end every task, socket and process; idempotent.

        Every caller returns when the service has stopped; one that is cancelled does so too, and is cancelled then.
        """
        if self._parts is None:
            self._phase = "stopped"
            return
        if self._stopping is None:
            self._phase = "stopping"
            self._stopping = self._parts.tasks.spawn("stop", self._stop(self._parts), handled=True)
        try:
            await asyncio.shield(self._stopping)
        except asyncio.CancelledError:
            await asyncio.wait({self._stopping})
            raise

    async def _stop(self, parts: Parts) -> None:
        self.survivors = await shut_down(parts, self.config.pause.deadline_s)
        self._phase = "stopped"

    def _died(self, name: str, error: BaseException, critical: bool) -> None:
        event = ComponentDied.of(name, error)
        if critical and self.failure is None:
            self.failure = event
            self.parts.batches.wake()
            self.parts.evaluations.fail(lambda: self._dead(event))
        self.bus.emit(event)

    def _dead(self, died: ComponentDied) -> NotNow:
        detail = {"traceback": died.traceback, "workers": whereabouts(self.parts)}
        return NotNow("failed", f"{died.component} died: {died.error}", detail=detail)

    def _ended(self, stopping: NotNowType = "stopping") -> NotNow | None:
        """Why nothing is to be had any more; None: it has neither failed nor been stopped."""
        if self.failure is not None:
            return self._dead(self.failure)
        return NotNow(stopping, "the service is stopping") if self._phase in ("stopping", "stopped") else None

    def check_alive(self, stopping: NotNowType = "stopping") -> None:
        """Raise NotNow where the service has failed, or stops."""
        if (ended := self._ended(stopping)) is not None:
            raise ended

    def _check_running(self) -> None:
        self.check_alive()
        if self._phase != "running":
            waiting = [w.worker_id for w in self.parts.pool.workers.values() if w.state is WorkerState.STARTING]
            raise NotNow("starting", f"engines are still loading: {', '.join(waiting)}")

    # -- pause and resume ------------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        mode: str | None = None,
        deadline_s: float | None = None,
        lanes: Iterable[Lane] = LANES,
        if_ticket: int | None = None,
        kv: str = "keep",
        offload: Iterable[str] = (),
    ) -> PauseReport:
        """Stop the stage; returns by the deadline with a report. See `docs/stopping.md`.

        Args:
            mode: `abort` ends what runs, `wait` lets it finish for half of the time, `keep` freezes it where it is.
            deadline_s: seconds until this has returned; None, like `mode`: as configured.
            lanes: what to stop; `keep` and `offload` take all, for they hold engines as a whole.
            if_ticket: only if this is still the number of the last pause.
            kv: in mode `keep`, whether frozen requests keep their KV cache, or `drop` it and make it again.
            offload: of `weights`, `kv_cache`: what idle engines give up until the resume.

        Raises:
            BadRequest: a value that means nothing, or what an engine cannot do. Conflict: `if_ticket` is old.
        """
        self._check_running()
        return await self.pauses.pause(Asked(mode, deadline_s, tuple(lanes), if_ticket, kv, tuple(offload)))

    async def resume(self, *, ticket: int | None = None, weight_version: int | None = None) -> dict[str, Any]:
        """Open the gate again; waits for a pause under way. With `weight_version`: only if every worker reports it."""
        self._check_running()
        await self.pauses.resume(ticket, weight_version)
        return self.status()

    # -- batches ---------------------------------------------------------------------------------------------

    async def take_batch(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> dict[str, Any]:
        """Lease a batch, as its record; see `batches.Batches.take`."""
        return (await self.lease_batch(step, groups, timeout_s, ack)).as_json()

    async def lease_batch(self, step: int, groups: int, timeout_s: float, ack: Iterable[str] = ()) -> Batch:
        """Lease a batch, still encoded: for whoever sends it on."""
        self.check_alive("failed")
        return await self.parts.batches.take(step, groups, timeout_s, ack)

    async def ack(self, batch_id: str) -> dict[str, Any]:
        """Consume a leased batch for good."""
        self.check_alive()
        return await self.parts.batches.acknowledge(batch_id)

    async def put_prompts(self, task: str, prompts: list[Any]) -> dict[str, int]:
        """Add prompts to a task that is fed by push; the same id is accepted once."""
        self.check_alive()
        return await push(self.parts, self.prepared.sources, task, prompts)

    async def evaluate(self, task: str, prompts: Sequence[Any], **how: Any) -> dict[str, Any]:
        """Have prompts answered and judged in lane `eval`, as their record; see `Evaluations.evaluate`."""
        return {"groups": await records_of(await self.run_evaluation(task, prompts, **how))}

    async def run_evaluation(
        self,
        task: str,
        prompts: Sequence[Any],
        *,
        sampling: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout_s: float,
    ) -> list[Group]:
        """Have prompts answered and judged, still encoded: for whoever sends them on."""
        self._check_running()
        evaluations = self.parts.evaluations
        return await evaluations.evaluate(task, prompts, sampling=sampling, version=version, timeout_s=timeout_s)

    async def checkpoint(self, path: str, step: int, ack: Iterable[str] = ()) -> dict[str, Any]:
        """Write a snapshot of everything that must survive; see `buffer.checkpoints.Checkpoints.write`."""
        self.check_alive()
        return await self.parts.checkpoints.write(path, step, ack)

    def _hopeless(self, groups: int) -> bool:
        """Whether a take of `groups` groups can never be met."""
        return self._ended() is not None or hopeless(self.parts, self.fleet.plan, groups)

    def _shortage(self, groups: int) -> Shortage:
        """Why `groups` groups are not there, and whether they can ever be."""
        if (ended := self._ended()) is not None:
            return Shortage("failed", ended.message, ended.detail or {}, final=True)
        return shortage_of(self.parts, self.fleet.plan, groups)

    async def update_weights(
        self, version: int, source: Mapping[str, Any], pause: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> dict[str, Any]:
        """Bring every worker to `version`, or to one it has had where that is forced; see `WeightCalls.update`."""
        self._check_running()
        return await self.weights.update(read_version(version), read_source(source), pause, force=force)

    # -- concurrency and workers -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The service's record of itself."""
        return describe(self.parts, self.state, self.fleet.plan) | {"memory": self.memory_watch.brief()}

    async def memory(self) -> dict[str, Any]:
        """What every process has, what grows with the steps, and who holds what; see `docs/memory.md`."""
        return await memory_record(self.memory_watch, self.parts, self.config)

    def stuck(self, older_than_s: float | None = None) -> dict[str, Any]:
        """Who has been under way for longer than that, and where; None: longer than `pause.deadline_s`."""
        return describe_stuck(self.parts, self.config.pause.deadline_s if older_than_s is None else older_than_s)

    def concurrency(self) -> dict[str, Any]:
        """The plan in force."""
        return self.fleet.plan.as_json()

    async def set_concurrency(
        self, trainer: Mapping[str, Any] | None = None, limits: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """Follow another trainer config (keys not given stay), or set workers' limits by hand.

        Raises:
            BadRequest: a value is out of bounds, or the plan is impossible; nothing has changed.
        """
        self.check_alive()
        return set_plan(self.fleet, trainer or {}, limits or {})

    def workers(self) -> list[dict[str, Any]]:
        """Every worker's record."""
        return [worker.as_json() for worker in self.parts.pool.workers.values()]

    async def add_worker(self, config: WorkerConfig) -> dict[str, Any]:
        """Add an engine to the fleet; it gets traffic once it answers and has the current weights.

        One with `launch` is started by the service, and ended when it is removed.
        """
        self.check_alive()
        await refuse_newcomer(config, on_cluster=self.config.cluster is not None)
        self.check_alive()
        return self.parts.pool.workers[add_one(self.fleet, config)].as_json()

    async def remove_worker(self, worker_id: str) -> dict[str, Any]:
        """Take an engine out of the fleet; what it runs may finish first."""
        self.check_alive()
        self.fleet.remove(worker_id)
        return {"id": worker_id, "state": str(WorkerState.DRAINING)}


def _made(part: T | None) -> T:
    if part is None:
        raise NotNow("starting", "the service has not been started")
    return part
