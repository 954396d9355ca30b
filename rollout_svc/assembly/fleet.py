"""The engines of a service: who looks after them, and who gives them weights.

Invariant: nothing is started by being made.
"""

from __future__ import annotations

from rollout_svc.assembly.ground import Ground
from rollout_svc.weights.confirmation import Confirmation
from rollout_svc.weights.fleet import Fleet
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.staging import Staging
from rollout_svc.weights.update import WeightUpdater
from rollout_svc.workers.control import Control
from rollout_svc.workers.freezing import Freezing
from rollout_svc.workers.launching import Launching
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.routing import Router
from rollout_svc.workers.sleeping import Sleeping
from rollout_svc.workers.supervisor import Supervisor

__all__ = ["FleetParts"]


class FleetParts:
    """Engines: reached, watched, launched, given weights."""

    def __init__(self, ground: Ground) -> None:
        config, tasks, bus = ground.config, ground.tasks, ground.bus
        update_timeout_s = config.weights.update_timeout_s or config.request_timeout_s
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
        presence = Presence(self.pool, tasks)
        confirmation = Confirmation(
            pool=self.pool, transport=ground.transport, bus=bus, presence=presence, new_id=ground.outside.new_id
        )
        self.fleet = Fleet(
            control=self.control,
            confirmation=confirmation,
            initial_version=config.trainer.initial_version,
            update_timeout_s=update_timeout_s,
        )
        self.freezing = Freezing(pool=self.pool, control=self.control, tasks=tasks)
        self.sleeping = Sleeping(control=self.control, bus=bus)
        self.supervisor = Supervisor(
            pool=self.pool,
            freezing=self.freezing,
            sleeping=self.sleeping,
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
            launcher=ground.outside.launcher(config),
            groups=ground.outside.groups(config.ray_address),
            tasks=tasks,
            bus=bus,
            rng=ground.rng,
        )
        staging = Staging(ground.transport, self.control, presence, update_timeout_s)
        self.updater = WeightUpdater(
            fleet=self.fleet,
            pool=self.pool,
            bus=bus,
            presence=presence,
            staging=staging,
            on_failure=config.weights.on_failure,
        )
        self.updater.on_half_loaded = self.launching.restart
