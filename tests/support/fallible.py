"""Engines of SGLang's dialect that fail in every way there is, over no sockets, and a publisher that may be gone.

What an engine has is known here, whatever it says: `weights` is a number that no others have, even of the same version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Final, cast

import orjson

from rollout_svc.config import WorkerConfig
from rollout_svc.engines import Call, Endpoint, EngineProfile, Reply
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.errors import WorkerFailure
from rollout_svc.events import EventBus
from rollout_svc.tasks import TaskOwner
from rollout_svc.weights.confirmation import Confirmation
from rollout_svc.weights.fleet import Fleet
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.staging import Staging
from rollout_svc.weights.update import OnFailure, WeightUpdater
from rollout_svc.workers.control import Control
from rollout_svc.workers.making import make_worker
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["PUBLISHER", "FallibleEngine", "FallibleFleet"]

PUBLISHER: Final = "http://publisher"
TIMEOUT_S: Final = 20.0
_LATE_S: Final = 5.0  # after the caller has given up
_CAN: Final = ("disk", "shm", "flush", "set_version", "weight_version")

Draw = Callable[[str, str], str]
"""By engine and path: `ok`, `refused` (nothing done), `lost` (done, not answered), `late` (done later), `dead`."""


class FallibleEngine:
    """One engine.

    Attributes:
        weights: which ones.
        label: what it reports.
        cached: under which weights its prefixes were made.
    """

    def __init__(self) -> None:
        self.weights: int | None = 0
        self.label = "0"
        self.cached: int | None = 0
        self.dead = False
        self.staged: int | None = None
        self.before: int | None = None
        self._lock = asyncio.Lock()

    async def control(self, path: str, body: dict[str, Any], late_s: float) -> Reply:
        """Carry a call out, after a while: one that changes weights waits for the one before it."""
        if path == "/model_info":
            return Reply(200, orjson.dumps({"weight_version": self.label, "model_path": "m"}))
        async with self._lock:
            await asyncio.sleep(late_s)
            return self._change(path, body)

    def _change(self, path: str, body: dict[str, Any]) -> Reply:
        label = body.get("weight_version") or body.get("new_version")
        if path == "/update_weights_from_disk":
            self.weights, self.before = int(str(body["model_path"]).rpartition("v")[2]), None
            self.cached = self.weights
        elif path == "/begin_weight_update":
            self.staged, self.before = -1, None
        elif path == "/update_weights_from_shared_memory":
            self.staged = body["weights"]
        elif path == "/end_weight_update":
            if self.staged in (None, -1):
                return Reply(400, b'{"success":false,"message":"nothing is staged"}')
            self.weights, self.before, self.staged = self.staged, self.weights, None
        elif path == "/revert_weight_update":
            if self.before is None:
                return Reply(400, b'{"success":false,"message":"there is nothing to go back to"}')
            self.weights, self.before = self.before, None
        elif path == "/abandon_weight_update":
            self.staged = None
        elif path == "/flush_cache":
            self.cached = self.weights
        if label is not None:
            self.label = str(label)
        return Reply(200, b'{"success":true}')


class FallibleFleet:
    """Engines, their workers, and the real updater over them. Also the pool, as far as an update needs one.

    Attributes:
        has: the weights that whoever is in traffic should have.
        published: those the publisher has.
    """

    def __init__(self, count: int, policy: OnFailure, draw: Draw) -> None:
        self.draw = draw
        self.workers: dict[str, Worker] = {}
        self.engines = {f"http://e{number}": FallibleEngine() for number in range(count)}
        self.tasks = TaskOwner(lambda *_: None)
        self.restarted: list[str] = []
        self._listeners: list[Callable[[], None]] = []
        self.has = self.published = 0
        self._buckets = 0
        pool = cast("WorkerPool", self)
        control = Control(self)
        bus, presence = EventBus(), Presence(pool, self.tasks)
        confirmation = Confirmation(pool=pool, transport=self, bus=bus, presence=presence, new_id=lambda: "0" * 32)
        self.fleet = Fleet(control=control, confirmation=confirmation, initial_version=0, update_timeout_s=TIMEOUT_S)
        staging = Staging(self, control, presence, TIMEOUT_S)
        self.updater = WeightUpdater(
            fleet=self.fleet, pool=pool, bus=bus, presence=presence, staging=staging, on_failure=policy
        )
        self.updater.on_half_loaded = lambda worker: self.restarted.append(worker.worker_id)
        for number, url in enumerate(self.engines):
            worker = make_worker(f"w{number}", WorkerConfig(url=url, dialect="sglang"), url, self, Random(0))
            worker.introduce(SGLangDialect(), EngineProfile("sglang", capabilities=_CAN, weight_label="0"))
            worker.version = worker.flushed = 0
            worker.become(WorkerState.ACTIVE, "in traffic")
            self.workers[worker.worker_id] = worker

    def engine(self, worker: Worker) -> FallibleEngine:
        """The engine behind a worker."""
        return self.engines[worker.endpoint.url]

    # -- what an update needs of a pool ----------------------------------------------------------------------

    def state_changed(self, *_: object) -> None:
        """Tell whoever listens."""
        self.fleet_changed()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call it at each change."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def fleet_changed(self) -> None:
        """Tell whoever listens."""
        for listener in list(self._listeners):
            listener()

    # -- the transport ---------------------------------------------------------------------------------------

    async def control(self, endpoint: Endpoint, call: Call, timeout_s: float) -> Reply:
        """Carry a call as it was drawn."""
        body = orjson.loads(call.body) if call.body else {}
        fault = self.draw(endpoint.url, call.path)
        if endpoint.url == PUBLISHER:
            return await self._publish(call.path, body, fault)
        engine = self.engines[endpoint.url]
        if fault == "dead" and not engine.dead:
            engine.dead = True
            [worker] = [one for one in self.workers.values() if one.endpoint.url == endpoint.url]
            worker.become(WorkerState.DEAD, "its process is gone")
        if engine.dead:
            raise WorkerFailure("connection", "refused", hard=True)
        if fault == "refused":
            return Reply(400, b'{"success":false,"message":"no"}')
        if fault == "ok":
            await asyncio.sleep(0.01)
            return await engine.control(call.path, body, 0.0)
        late_s = timeout_s + _LATE_S if fault == "late" else 0.0
        self.tasks.spawn("arrives", engine.control(call.path, body, late_s))
        await asyncio.sleep(timeout_s)
        raise WorkerFailure("control_timeout", "no answer", accepted=True)

    async def _publish(self, path: str, body: dict[str, Any], fault: str) -> Reply:
        await asyncio.sleep(0.01)
        if fault != "ok":
            raise WorkerFailure("connection", "the publisher is gone", hard=True)
        if path == "/begin":
            self._buckets = 2
            self._ids = [engine["id"] for engine in body["engines"]]
            return Reply(200, b"{}")
        if path == "/next":
            self._buckets -= 1
            bodies = {name: {"weights": self.published} for name in self._ids} if self._buckets >= 0 else None
            return Reply(200, orjson.dumps({"bodies": bodies, "bytes": 1}))
        return Reply(200, b"{}")

    async def data(self, endpoint: Endpoint, call: Call) -> Reply:
        """Nothing is generated."""
        raise AssertionError(f"{call} to {endpoint} during an update")

    async def stream(self, endpoint: Endpoint, call: Call, reader: object) -> Reply:
        """Nothing is generated."""
        raise AssertionError(f"{call} to {endpoint} during an update, {reader}")

    async def close(self) -> None:
        """There is nothing to close."""
