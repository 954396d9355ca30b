"""One life of the service, from its start to its stop or its crash.

Invariants:

- Everything the service does runs in the context of its life, so that `kill` ends all of it and nothing else.
- Calls come from outside; see `calls.py`.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from rollout_svc.config import Portion
from rollout_svc.engines import Endpoint
from rollout_svc.events import Event, EventBus
from rollout_svc.gate import Lane
from rollout_svc.group import Group
from rollout_svc.outside import Outside
from rollout_svc.sample import Sample
from rollout_svc.service import RolloutService
from rollout_svc.workers.worker import Worker
from tests.simulation.calls import Callee, Gone
from tests.simulation.journal import SimJournal, SimStorage
from tests.simulation.shape import MAX_TOKENS, Shape
from tests.simulation.threads import SimThreads
from tests.simulation.transport import SimTransport
from tests.simulation.wire_log import WireLog
from tests.simulation.witness import Witness

if TYPE_CHECKING:
    from rollout_svc.assembly import Parts
    from tests.simulation.world import World

__all__ = ["Gone", "Life", "NoProcesses"]


class NoProcesses:
    """Judgers here are asynchronous: no process is ever asked for."""

    def submit(self, spec: Any, method: str, payload: Any, timeout_s: float) -> NoReturn:
        """Refuse."""
        raise AssertionError("a process was asked for")

    async def close(self) -> None:
        """Nothing to close."""


class Life(Callee):
    """A running service and the world's hold on it."""

    max_tokens = MAX_TOKENS

    def __init__(self, world: World, shape: Shape, number: int, portion: Portion | None = None) -> None:
        super().__init__(world, number)
        self.shape = shape
        self.config = shape.config
        self.ready = False
        self.unsaid = 0
        self.boots: dict[str, int] = {}  # by engine: which of its processes confirmed the last freeze
        self.bus = EventBus(on_error=self._bus_error)
        self.witness = Witness(self)
        self.wire_log = WireLog(self)
        self.threads = SimThreads(self)
        self.saving: dict[str, Group] = {}  # being written to the journal
        self._ids = Random(f"{world.seed}:ids:{number}")
        self._workers: dict[Endpoint, Worker] = {}
        self.service = RolloutService(
            shape.config,
            bus=self.bus,
            rng=Random(f"{world.seed}:service:{number}"),
            outside=Outside(
                transport=lambda: SimTransport(self),
                processes=NoProcesses,
                threads=lambda: self.threads,
                storage=lambda: SimJournal(self) if shape.journalled else SimStorage(self),
                wall=lambda: world.now,
                new_id=lambda: f"{self._ids.getrandbits(128):032x}",
                probes=False,
            ),
            portion=portion,
        )

    @property
    def parts(self) -> Parts:
        """The parts of the running service."""
        return self.service.parts

    def worker(self, endpoint: Endpoint) -> Worker:
        """The worker at an endpoint."""
        worker = self._workers.get(endpoint)
        if worker is None:
            worker = next(w for w in self.parts.pool.workers.values() if w.endpoint is endpoint)
            self._workers[endpoint] = worker
        return worker

    def sample(self, sample_id: str) -> Sample | None:
        """A sample that is under way."""
        run = self.parts.rollouts._runs.get(sample_id.rpartition(".")[0])
        if run is None:
            return None
        return next((sample for sample in run.group.samples if sample.sample_id == sample_id), None)

    def keeps_partials(self, sample_id: str) -> bool:
        """Whether a sample under way that was cut goes on from its tokens, by its task's settings."""
        run = self.parts.rollouts._runs.get(sample_id.rpartition(".")[0])
        if run is None:
            return True
        [partial] = [task.partial_rollout for task in self.config.tasks if task.name == run.group.prompt.task]
        if partial is None:  # at staleness 0 an update leaves none that could be used, but where none is cut by one
            return self.config.trainer.max_staleness > 0 or self.config.producer.strategy == "sync"
        return partial

    def wants_experts(self, sample_id: str) -> bool:
        """Whether a sample under way is to have routed experts: one of training, by its task's settings."""
        run = self.parts.rollouts._runs.get(sample_id.rpartition(".")[0])
        if run is None or run.host is not None or not self.config.experts.enabled:
            return False
        [wants] = [t.sampling.return_routed_experts for t in self.config.tasks if t.name == run.group.prompt.task]
        return wants

    def mistrusts(self, url: str) -> bool:
        """Whether the engine at an address is not believed in what it says it can do."""
        workers = self.parts.pool.workers.values() if self.up and self.service._parts is not None else ()
        return any(worker.withdrawn for worker in workers if worker.endpoint.url == url)

    def lane(self, sample_id: str) -> Lane:
        """The lane of a sample; `train` for one that is over."""
        run = self.parts.rollouts._runs.get(sample_id.rpartition(".")[0])
        return "train" if run is None else run.group.lane

    def _bus_error(self, event: Event, error: Exception) -> None:
        self.world.breaks("bus", f"{event!r}: {error!r}")

    # -- death -----------------------------------------------------------------------------------------------

    def crash(self, why: str) -> None:
        """End as by `kill -9`: nothing is closed, connections break."""
        if not self.up:
            return
        world = self.world
        world.say("service", "is killed", why)
        self.up = self.ready = False
        world.loop.kill(self.number)
        world.arrive()
        for request in list(self.witness.open.values()):
            if request.engine is not None:
                request.engine.disconnected(request, noticed=world.rng.random() < 0.6)
        self.leave_callers()
        world.service_died()

    async def dies(self, why: str) -> None:
        """Crash from within: the caller runs no line more."""
        self.world.faults.once(why)
        self.world.later(0.0, self.crash, why)
        await asyncio.get_running_loop().create_future()
