"""Why the producer waits, and what is told of it.

Invariants:

- A reason is told once, when it begins to hold; reasons that come and go with every batch are not told.
- That every group fails is told once until one is finished, however many trials there are in between.
"""

from __future__ import annotations

from typing import Final

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.events import EventBus, ProducerWaiting
from rollout_svc.producer.caution import Cautions
from rollout_svc.workers.pool import WorkerPool

__all__ = ["Waiting"]

_TOLD: Final = frozenset({"no_worker", "no_prompts"})
"""Reasons that are told as events with the workers' states: the others come and go with every batch."""


class Waiting:
    """See the module's invariants.

    Attributes:
        reason: why nothing can be started; empty: something was, last.
        warned: it was told that every group fails, and none was finished since.
        batch: groups of a batch, for those who wonder how large a buffer would have to be.
    """

    def __init__(self, bus: EventBus, buffer: ReplayBuffer, pool: WorkerPool, caution: Cautions) -> None:
        self.reason = ""
        self.warned = False
        self.batch = 0
        self._bus = bus
        self._buffer = buffer
        self._pool = pool
        self._caution = caution

    def over(self) -> None:
        """Something was started."""
        self.reason = ""

    def say(self, reason: str) -> None:
        """Nothing can be started for this reason."""
        if reason == self.reason:
            return
        self.reason = reason
        if reason == "every_group_fails":
            if not self.warned:  # once, and not again after every trial
                self._bus.emit(ProducerWaiting(reason, self._caution.reason))
            self.warned = True
        elif reason == "buffer_full":
            self._bus.emit(ProducerWaiting(reason, self._buffer.why_full(self.batch)))
        elif reason in _TOLD:
            states = ", ".join(f"{w.worker_id}: {w.state} ({w.reason})" for w in self._pool.workers.values())
            self._bus.emit(ProducerWaiting(reason, states or "no workers"))
