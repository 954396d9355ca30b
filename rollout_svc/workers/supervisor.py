"""Looks after each worker: reaches it, keeps its control connection warm, notices its death, brings it back.

Invariants:

- One task per worker is the only one that brings a worker into traffic; whoever else notices a fault only takes
  it out.
- No worker gets traffic before `admit` said that it has the current weights, and none is brought to them while a pause
  climbs: what was cancelled there may still run.
- A launched worker whose process does not run is not asked anything: its address may be somebody else's by now.
- A quarantined worker always has a way back: its own count at 0, or a canary after `quarantine_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from rollout_svc.engines import EngineInfo, Transport
from rollout_svc.errors import ADMIN_KEY, WorkerFailure
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.canary import Canary
from rollout_svc.workers.control import Control
from rollout_svc.workers.freezing import Freezing
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.presence import PARTLY, end_calls, forget_process, is_another, is_lost
from rollout_svc.workers.sleeping import Sleeping
from rollout_svc.workers.worker import Quarantine, Worker, WorkerState

__all__ = ["REFUSING", "Admit", "Supervisor"]

Admit = Callable[[Worker, EngineInfo, Callable[[], bool]], Awaitable[str | None]]
"""Brings a worker to the current weights, as long as the callable says that nothing came in between."""

_PROBE_S: Final = 2.0  # seconds between pings: shorter than the engines' keep-alive, so the connection stays warm
_FIRST_REACH_S: Final = 0.25  # seconds between attempts to reach an engine that is still loading, doubling
_REACH_CAP_S: Final = 5.0
_REACH_OURS_S: Final = 1.0  # the same for an engine of ours, on this machine: nobody minds being asked
_GONE_S: Final = 1.0  # seconds between two looks where nobody is: a refused connection costs nobody anything
_RESIDUAL_POLL_S: Final = 0.5  # seconds between two looks at a quarantined worker's own count
_REFUSED_CAP_S: Final = 30.0  # seconds between two tries to bring the weights to a worker that refuses them
REFUSING: Final = frozenset({ADMIN_KEY, "unauthorized", "forbidden", "not_found", "unfit", "wrong_dialect"})
"""Kinds of failure of an engine that answers, and says no: waiting does not help."""

_PATIENCE: Final = (
    5  # looks in vain since its last answer before a worker that lacks an engine loses its requests: 12 s
)


class Supervisor:
    """One looking-after task per worker."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        freezing: Freezing,
        sleeping: Sleeping,
        control: Control,
        transport: Transport,
        tasks: TaskOwner,
        admit: Admit,
        quarantine_s: float,
        new_id: Callable[[], str],
    ) -> None:
        self._pool = pool
        self._freezing = freezing
        self._sleeping = sleeping
        self._control = control
        self._tasks = tasks
        self._admit = admit
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._quarantine_s = quarantine_s
        self._canary = Canary(pool=pool, transport=transport, may=self._admitting.is_set, new_id=new_id)
        self.on_removed: Callable[[Worker], None] = lambda _: None
        self.unfit: Callable[[Worker], str | None] = lambda _: None  # why an engine that said what it is stays out
        self._steps: dict[WorkerState, Callable[[Worker], Awaitable[None]]] = {
            WorkerState.STARTING: self._reach,
            WorkerState.ACTIVE: self._watch,
            WorkerState.RECOVERING: self._recover,
            WorkerState.DEAD: self._recover,
            WorkerState.QUARANTINED: self._release,
            WorkerState.DRAINING: self._drain,
        }

    def look_after(self, worker: Worker) -> None:
        """Start the worker's task; it ends when the worker is removed."""
        self._tasks.spawn(f"watch:{worker.worker_id}", self._run(worker))

    def lost(self, worker: Worker, reason: str) -> None:
        """Its process ended: nobody is sent there, and what it ran goes elsewhere."""
        self._declare_dead(worker, reason)

    def hold(self) -> None:
        """Let nobody in until `release`: a pause climbs."""
        self._admitting.clear()

    def release(self) -> None:
        """Let in again."""
        self._admitting.set()

    async def _run(self, worker: Worker) -> None:
        while self._pool.workers.get(worker.worker_id) is worker:
            if worker.absent and worker.state is not WorkerState.DRAINING:
                await _attention(worker, _PROBE_S)
            else:
                await self._steps[worker.state](worker)

    async def _look(self, worker: Worker) -> EngineInfo:
        """Find out what is there: it may be another engine than it was. Raises WorkerFailure, `unfit` among them."""
        if worker.withdrawn:  # a label that is the same, or none, does not tell whether the process is
            info = await self._control.info(worker)
            if None not in (info.process, worker.process) and info.process != worker.process:
                worker.withdrawn.clear()
        await self._control.probe(worker)
        if (words := self.unfit(worker)) is not None:
            worker.refusal = WorkerFailure("unfit", words, hard=True)
            raise worker.refusal
        return await self._control.info(worker)

    # -- one step per state ----------------------------------------------------------------------------------

    async def _reach(self, worker: Worker) -> None:
        """STARTING: the engine may still be loading; ask until it answers."""
        wait_s = _FIRST_REACH_S
        while worker.state is WorkerState.STARTING and not worker.absent:
            try:
                info = await self._look(worker)
            except WorkerFailure as failure:
                if failure.kind in REFUSING:
                    worker.heard()
                    worker.refusal = failure
                    worker.breaker.trip(asyncio.get_running_loop().time())
                    worker.become(WorkerState.RECOVERING, str(failure))
                    return
                if not worker.absent:
                    worker.reason = str(failure)
                    await _attention(worker, wait_s)
                wait_s = min(_REACH_CAP_S if worker.launched is None else _REACH_OURS_S, wait_s * 2)
            else:
                await self._let_in(worker, info)

    async def _watch(self, worker: Worker) -> None:
        """ACTIVE: ping; an engine that refuses connections, or stays silent, is dead; one not ready has no traffic.

        One whose connection broke is asked for its weights instead, at once: it may be another process by now.
        """
        if not worker.unsure:
            await _attention(worker, _PROBE_S)
        elif worker.probe_failures or worker.loading:
            await _attention(worker, _FIRST_REACH_S)
        if worker.state is not WorkerState.ACTIVE:
            return
        try:
            if worker.unsure:
                self._assure(worker, await self._control.info(worker))
            else:
                await self._check_health(worker)
        except WorkerFailure as failure:
            if is_lost(worker, failure) and worker.state is WorkerState.ACTIVE:
                if failure.kind in PARTLY:
                    self._set_aside(worker, failure)
                else:
                    self._declare_dead(worker, str(failure))
                    forget_process(worker, failure)
        else:
            worker.probe_failures = 0
            if worker.asleep is None:
                await self._freezing.thaw_late(worker)

    async def _check_health(self, worker: Worker) -> None:
        """Ping; raises WorkerFailure where nobody is there. One held or asleep is not ready; one that answers is."""
        answered = worker.answered
        health = await self._control.ping(worker)
        if not health.alive:
            raise WorkerFailure("unhealthy", health.reason, accepted=True)
        told = worker.freeze is None and worker.asleep is None
        told = told and asyncio.get_running_loop().time() >= worker.monitor_until
        if not health.ready and told and worker.answered == answered == worker.answered_before:
            worker.breaker.trip(asyncio.get_running_loop().time())
            if worker.state is WorkerState.ACTIVE:
                worker.become(WorkerState.RECOVERING, f"it is not ready: {health.reason}")
        worker.answered_before = answered

    def _assure(self, worker: Worker, info: EngineInfo) -> None:
        """Give an engine that still has its weights its traffic back, and take any other out."""
        if worker.state is not WorkerState.ACTIVE or worker.loading:  # an update may have labelled it anew meanwhile
            return
        if worker.is_same(info) if not worker.labels else info.weight_version == worker.version:
            worker.unsure = False
            self._pool.changed(worker)
        elif not worker.labels:
            worker.version = None  # it may be another process by now, and cannot say what it has
            worker.put_in_quarantine("version", "its connection broke, and it reports no weight version")
        else:
            label = info.weight_label if not info.differing else info
            worker.restarted(f"it was restarted: it reports {label}, not {worker.version}")

    @staticmethod
    def _set_aside(worker: Worker, failure: WorkerFailure) -> None:
        """Not all engines behind a worker are there: it is out, and what the others run goes on.

        Where one is silent its requests have to go elsewhere, and nobody knows which they are. One that refuses
        connections has broken them, or else they end after a few more looks.
        """
        worker.breaker.trip(asyncio.get_running_loop().time())
        worker.become(WorkerState.RECOVERING, str(failure))
        if failure.accepted:
            end_calls(worker)

    def _declare_dead(self, worker: Worker, reason: str) -> None:
        worker.breaker.trip(asyncio.get_running_loop().time())
        if not worker.labels and worker.process is None:
            worker.version = None  # else it is known when it is met again whether it is the same process
        worker.become(WorkerState.DEAD, reason)
        end_calls(worker)

    async def _recover(self, worker: Worker) -> None:
        """RECOVERING, DEAD: wait out the back-off, ask again, and let one trial through.

        A generation takes minutes, and one that is tried with a whole one has an empty engine meanwhile: it is tried
        with a token first. Where that is made it gets all its traffic, until the first failure.
        """
        wait_s = worker.breaker.retry_at - asyncio.get_running_loop().time()
        if wait_s > 0:
            await _attention(worker, wait_s)
            return
        try:
            info = await self._look(worker)
            health = await self._control.ping(worker)
        except WorkerFailure as failure:
            if not worker.absent:
                worker.reason = str(failure)
            now = asyncio.get_running_loop().time()
            if failure.kind == "connection" and not failure.accepted:
                forget_process(worker, failure)
                worker.breaker.look_again(now, _GONE_S)
            else:
                worker.breaker.trip(now)
            if failure.kind in PARTLY and worker.breaker.opened > _PATIENCE and not worker.standing:
                end_calls(worker)
            return
        if not await self._woken(worker, info):
            worker.breaker.trip(asyncio.get_running_loop().time())
            return
        works = await self._works(worker)
        if not (health.alive and health.ready) and not works:
            worker.reason = f"it is not ready: {health.reason}"
            worker.breaker.trip(asyncio.get_running_loop().time())
            return
        if worker.state in (WorkerState.RECOVERING, WorkerState.DEAD):
            worker.breaker.half_open(proved=works)
            await self._let_in(worker, info)

    async def _release(self, worker: Worker) -> None:
        """QUARANTINED: out again when the engine is idle by its own count, or a canary works, with the weights."""
        await _attention(worker, min(_REFUSED_CAP_S, _RESIDUAL_POLL_S * 2 ** min(worker.refusals, 16)))
        quarantine = worker.quarantine
        if quarantine is None or worker.state is not WorkerState.QUARANTINED:
            return
        if worker.frozen and worker.calls:
            return  # a pause holds what it runs
        left = quarantine.kind == "residual"
        if not await self._freezing.thaw(worker) or (left and not await self._emptied(worker, quarantine)):
            await self._miss(worker)
            return
        if worker.quarantine is not quarantine:
            return
        try:
            info = await self._look(worker)
        except WorkerFailure as failure:
            worker.reason = f"{quarantine.kind}: {failure}"
            forget_process(worker, failure)
            return
        await self._let_in(worker, info)

    async def _drain(self, worker: Worker) -> None:
        """DRAINING: gone once its last call has ended, or ended by us where the engine does not answer any more."""
        if not worker.calls:
            if not worker.absent:
                await self._freezing.thaw(worker)
            self._pool.remove(worker.worker_id)
            self.on_removed(worker)
            return
        await _attention(worker, _PROBE_S)
        try:
            await self._control.ping(worker)
        except WorkerFailure as failure:
            if is_lost(worker, failure):
                end_calls(worker)
        else:
            worker.probe_failures = 0

    # -- parts -----------------------------------------------------------------------------------------------

    async def _emptied(self, worker: Worker, quarantine: Quarantine) -> bool:
        """Whether nothing of a pause is left there, by its own count, or it works all the same."""
        if worker.asleep is None and not await self._freezing.thaw_found(worker):
            return False  # whoever froze it: a count says nothing of what waits at a frozen engine's door
        count = await self._control.count(worker)
        # With calls of another lane open it cannot be told: an answer may be on its way, a request not there yet.
        worker.residual = count if not count or not worker.calls else None
        if worker.residual == 0:
            return True
        waited = asyncio.get_running_loop().time() - quarantine.since
        due = waited >= self._quarantine_s and self._admitting.is_set()  # no request starts while a pause climbs
        return due and await self._canary.sing(worker)

    async def _miss(self, worker: Worker) -> None:
        """Find out whether an engine that does not go on, or does not say that it is empty, is there at all."""
        try:
            await self._control.ping(worker)
        except WorkerFailure as failure:
            worker.reason = str(failure)
            forget_process(worker, failure)

    async def _let_in(self, worker: Worker, info: EngineInfo) -> None:
        worker.heard()
        before, quarantine, known = worker.state, worker.quarantine, frozenset(worker.withdrawn)

        def undisturbed() -> bool:
            same = worker.state is before and worker.quarantine is quarantine and not worker.absent
            believed = known.issuperset(worker.withdrawn)  # what it still ran may just have shown what it cannot do
            return same and believed and self._admitting.is_set()

        await self._admitting.wait()
        if not undisturbed():
            return
        if not await self._woken(worker, info):
            if undisturbed():
                self._keep_out(worker, worker.reason)
            return
        if is_another(worker, info):
            worker.incarnation += 1
        worker.meet(info)
        if not await self._freezing.thaw_found(worker):
            kept_out: str | None = "it does not say that it is not frozen, as a service that died may have left it"
        elif not worker.calls and not await self._freezing.thaw(worker):  # it may be one that died frozen, and back
            kept_out = "it is frozen and does not go on"
        else:
            kept_out = await self._admit(worker, info, undisturbed)
        if not undisturbed():
            return  # drained, declared dead, put in quarantine, or met by a pause: another look decides
        if kept_out is None:
            worker.probe_failures = worker.refusals = 0
            if worker.breaker.state == "open":
                worker.breaker.half_open()
            worker.active_since = asyncio.get_running_loop().time()
            worker.become(WorkerState.ACTIVE, "in traffic")
            return
        self._keep_out(worker, kept_out)

    def _keep_out(self, worker: Worker, reason: str) -> None:
        worker.refusals += 1
        if worker.quarantine is None or worker.quarantine.kind != "version":
            worker.put_in_quarantine("version", reason)
        else:
            worker.reason = reason
            self._pool.changed(worker)  # somebody may wait for the look, and its state is as before

    async def _woken(self, worker: Worker, info: EngineInfo) -> bool:
        """Whether it has all its memory, taken back where nobody has it; else its reason says why not."""
        self._sleeping.met(worker, info, other=is_another(worker, info))
        try:
            if not worker.active_since:  # one that fell asleep since is somebody else's to wake
                await self._sleeping.find(worker)
        except WorkerFailure as failure:
            worker.reason = str(failure)
            return False
        if worker.asleep is None:
            return True
        if self._sleeping.lent:
            worker.reason = "it is asleep until the resume"
            return False
        if (reason := await self._sleeping.wake(worker)) is not None:
            worker.reason = f"it does not wake: {reason}"
            return False
        try:
            await self._look(worker)  # asleep, it may not have told all it can do
        except WorkerFailure as failure:
            worker.reason = str(failure)
            return False
        return True

    async def _works(self, worker: Worker) -> bool:
        """Whether an engine that calls itself not ready generates all the same; not asked while a pause climbs."""
        held = worker.freeze is not None or worker.asleep is not None
        return self._admitting.is_set() and not held and await self._canary.sing(worker)


async def _attention(worker: Worker, seconds: float) -> None:
    """Wait until the worker's state changes, at most `seconds`."""
    worker.attention.clear()
    try:
        async with asyncio.timeout(seconds):
            await worker.attention.wait()
    except TimeoutError:
        return
