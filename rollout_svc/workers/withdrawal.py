"""What is done with a worker whose engine did not do what it says it can.

Invariants:

- It is said once, and the worker gets no more traffic: it is a newcomer that lacks what is needed, until its process is
  another one.
- What it runs goes on and is judged by its answers.
"""

from __future__ import annotations

from rollout_svc.events import CapabilityWithdrawn, EventBus
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["withdraw"]


def withdraw(worker: Worker, capability: str, reason: str, bus: EventBus) -> None:
    """Believe an engine no more that it can do this; to be called at every answer that shows it.

    Args:
        worker: whose engine.
        capability: one that the settings need.
        reason: what it did instead, for people.
        bus: where it is said.
    """
    if not worker.withdraw(capability, reason):
        return
    bus.emit(CapabilityWithdrawn(worker.worker_id, capability, reason))
    if worker.state is WorkerState.ACTIVE:
        worker.turn_away(f"{worker.worker_id} at {worker.endpoint.url} {reason}")
