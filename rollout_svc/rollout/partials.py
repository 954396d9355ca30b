"""Samples under way, written down every so often: what was received before a crash is not generated again.

Invariants:

- A sample is noted as it would be handed back at that moment: its tokens, and those of the call it waits for.
- Tokens are never noted twice: a call that has ended is in the sample's own segments, and is not looked at.
- What could not be gone on with is not noted: a loop that is past its first turn begins again from its prompt.
- It takes a tenth of the loop's time at most: where there is more to write, it writes more seldom.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from rollout_svc.buffer.storage import Storage
from rollout_svc.rollout.member import Member
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.sample import SampleStatus
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.so_far import so_far
from rollout_svc.workers.worker import EngineCall, Worker

__all__ = ["Partials"]

_SLICE: Final = 16  # members looked at in one turn of the loop
_SLICE_S: Final = 0.004  # and no other after this long: reading a stream of thousands of events again takes longer
_REST: Final = 9.0  # a slice is followed by a rest of so many times its own length
_S: Final = SampleStatus


class Partials:
    """Has samples under way written down, again and again."""

    def __init__(
        self,
        *,
        rollouts: Rollouts,
        pool: WorkerPool,
        storage: Storage,
        interval_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Note what `rollouts` has every `interval_s`; `clock` measures what that takes, seconds; None: the loop's."""
        self._rollouts = rollouts
        self._pool = pool
        self._storage = storage
        self._interval_s = interval_s
        self._clock = clock or asyncio.get_running_loop().time

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Note every sample under way that is not as it was noted last."""
        members = deque(self._rollouts.members(("train",)))
        while members:
            began = self._clock()
            calls = self._calls()
            for _ in range(min(_SLICE, len(members))):
                self._note(members.popleft(), calls)
                if self._clock() - began >= _SLICE_S:
                    break
            await asyncio.sleep(_REST * (self._clock() - began))

    def _calls(self) -> dict[str, tuple[Worker, EngineCall]]:
        """Streamed calls under way, by sample."""
        return {
            call.sample_id: (worker, call)
            for worker in self._pool.workers.values()
            if worker.stream
            for call in worker.calls.values()
        }

    def _note(self, member: Member, calls: dict[str, tuple[Worker, EngineCall]]) -> None:
        sample = member.sample
        if sample.attempt != member.attempt or sample.account != "in_flight":
            return
        if sample.status is not _S.GENERATING:
            self._storage.kept(sample)
        elif sample.turn == 0 and all(segment.by_model for segment in sample.segments):
            worker, call = calls.get(sample.sample_id, (None, None))
            more = so_far(worker, call, sample.turn) if worker is not None and call is not None else None
            if more is not None or sample.segments:
                self._storage.kept(sample, more)
