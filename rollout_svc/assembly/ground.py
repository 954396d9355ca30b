"""What every part of a service stands on: gate, ledger, bus, tasks, and what does I/O.

Invariant: it is made before anything that uses it, and knows nothing of that.
"""

from __future__ import annotations

from random import Random

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Storage
from rollout_svc.config import Config
from rollout_svc.events import EventBus
from rollout_svc.gate import Gate
from rollout_svc.judging import ProcessRunner
from rollout_svc.judging.processes import JudgePool
from rollout_svc.ledger import Ledger
from rollout_svc.outside import Outside
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.sessions.registry import Sessions
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import OnDeath, TaskOwner
from rollout_svc.tensors import Handles, Store
from rollout_svc.trajectories import Trajectories
from rollout_svc.workers.experts import ExpertsDesk

__all__ = ["Ground"]


class Ground:
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
        self.sessions = Sessions(config.sessions, tasks=self.tasks, gate=self.gate)
        self.transport = outside.transport()
        self.storage = storage
        own = outside.processes
        self.processes: ProcessRunner = JudgePool(config.judges.processes) if own is None else own()
        self.tool_processes = outside.tools()
        self.handles = Handles(debug=config.memory.debug)
        self.experts = ExpertsDesk(config.experts, self.handles, store, outside.threads(), self.tasks, bus)
        self.ledger, self.tally, self.buffer = Ledger(), Tally(), ReplayBuffer(config.buffer.max_bytes)
        self.settling = Settling(tally=self.tally, bus=bus, storage=self.storage)
        self.trajectories = Trajectories(config.trajectories, bus=bus)
