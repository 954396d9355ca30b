"""Early cancel: groups that no step can take any more are ended before they are finished.

Ready groups are left to the sweep at hand-over, which alone is the promise: this one only saves what engines and judges
would do for nothing.

Invariants:

- A group is judged by its tokens that are known, against the next step: what is still on its way is met at hand-over.
- Running groups are ended while the lane is open; in a pause they are the ladder's.
- A sweep is done once for each state of step, weights, bound and lane, and never holds the loop for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.producer.schedule import Demand
from rollout_svc.producer.staleness import doomed
from rollout_svc.producer.tail import Tail
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.run import GroupRun
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling

__all__ = ["EarlyCancel"]

_GONE: Final = "weights_gone"
_SLICE: Final = 64  # groups looked at, or tasks cancelled, between two yields: a few milliseconds


class EarlyCancel:
    """Ends what must expire."""

    def __init__(
        self,
        *,
        gate: Gate,
        rollouts: Rollouts,
        buffer: ReplayBuffer,
        settling: Settling,
        tail: Tail,
        runtimes: Mapping[str, TaskRuntime],
    ) -> None:
        self._gate = gate
        self._rollouts = rollouts
        self._buffer = buffer
        self._settling = settling
        self._tail = tail
        self._runtimes = runtimes
        self._swept: tuple[int, int, int, bool] | None = None

    def doomed(self, group: Group, step: int, max_staleness: int) -> str | None:
        """Why a group that is not finished can never be handed over at `step` or later, or None."""
        partial = self._rollouts.keeps_partials(self._runtimes[group.prompt.task])
        return doomed(group, step, max_staleness, partial=partial)

    async def sweep(self, demand: Demand, max_staleness: int) -> None:
        """End every unfinished group that is too old for the next step, running ones while the lane is open."""
        state = (demand.version, demand.next_step, max_staleness, self._gate.is_open("train"))
        if state == self._swept:
            return
        self._swept = state
        spent = 0
        for group, run in self._candidates():
            reason = self.doomed(group, demand.next_step, max_staleness)
            if reason is not None:
                spent += self.end(group, reason) if run is None else run.end("expired", reason)
            spent += 1
            if spent >= _SLICE:
                spent = 0
                await asyncio.sleep(0)

    def weights_went_to(self, version: int) -> None:
        """End what has tokens of later weights than those that were just loaded: a trainer went back, they are gone.

        Their numbers will be given again, to other weights, and such tokens would then count as new.
        """
        for group in self._buffer.unfinished_groups():
            if group.account == "aborted" and group.newer_than(version):
                self.end(group, _GONE)
        for run in self._rollouts.runs(("train",)):
            if not run.closed and run.group.newer_than(version):
                run.end("expired", _GONE)
        for group in self._buffer.ready_groups():
            if group.newer_than(version):
                self._buffer.drop_ready(group)
                self._settling.settle(group, "expired", _GONE)
        self._buffer.changed()

    def _candidates(self) -> Iterator[tuple[Group, GroupRun | None]]:
        """Unfinished groups, each as it is when its turn comes, and the runs that have them."""
        for group in self._buffer.unfinished_groups():
            if group.account == "aborted":
                yield group, None
        for run in self._rollouts.runs(("train",)):
            if not self._gate.is_open("train"):
                return
            if not run.closed and run.putting is None and not run.group.complete:
                yield run.group, run

    def end(self, group: Group, reason: str) -> int:
        """Settle a group that waits in the buffer to go on; cancels nothing."""
        self._buffer.take_out(group)
        self._tail.drop(group)
        self._settling.settle(group, "expired", reason)
        self._buffer.changed()
        return 0
