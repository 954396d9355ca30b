"""The producing loop: keeps the fleet at its target, and waits for events, never for time alone.

Invariants:

- Deciding and starting are one step without an await: nothing is started after the gate closed.
- A prompt is used up in the same step that admits it; a loop that is stopped anywhere loses none.
- Whatever could change the decision calls `wake`; a group that rests sets the one timer there is.
- While nothing can be started the loop says why, once per reason.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, Final

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.errors import SampleFailure
from rollout_svc.events import EventBus, GroupAdmitted, GroupSettled, ProducerWaiting
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.plan import Plan
from rollout_svc.producer.lines import prompt_id
from rollout_svc.producer.schedule import Counts, Decision, decide, next_task
from rollout_svc.producer.sources import PromptSource
from rollout_svc.prompt import Prompt
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.tally import Tally
from rollout_svc.tokens import TextCodec
from rollout_svc.workers.pool import WorkerPool

__all__ = ["Producer"]

_SLICE: Final = 8  # groups started between two yields, so that opening connections never holds the loop for long


class Producer:
    """Admits prompts and continues unfinished groups, in lane `train`."""

    def __init__(
        self,
        *,
        gate: Gate,
        pool: WorkerPool,
        rollouts: Rollouts,
        buffer: ReplayBuffer,
        ledger: Ledger,
        bus: EventBus,
        codec: TextCodec,
        tally: Tally,
        runtimes: Mapping[str, TaskRuntime],
        sources: Mapping[str, PromptSource],
        group_size: int,
    ) -> None:
        self.plan: Plan | None = None
        self.waiting = ""
        self.admitted: dict[str, int] = dict.fromkeys(runtimes, 0)
        self._gate = gate
        self._pool = pool
        self._rollouts = rollouts
        self._buffer = buffer
        self._ledger = ledger
        self._bus = bus
        self._codec = codec
        self._tally = tally
        self._runtimes = runtimes
        self._sources = sources
        self._group_size = group_size
        self._active_workers = 0
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def exhausted(self) -> bool:
        """Whether no source will ever give another prompt."""
        return all(source.exhausted for source in self._sources.values())

    def set_plan(self, plan: Plan, group_size: int) -> None:
        """Follow another plan from now on; groups under way keep their size."""
        self.plan = plan
        self._group_size = group_size
        self.wake()

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    def room(self) -> None:
        """A generation ended: look again if that brought the fleet below its target; asked once per sample."""
        if self.plan is not None and self._rollouts.generating < self.plan.required * self._active_workers:
            self._wake.set()

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def run(self) -> None:
        """Produce until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            started = 0
            while await self._step():
                started += 1
                if started % _SLICE == 0:
                    await asyncio.sleep(0)
            self._rest()

    def _decide(self) -> Decision:
        plan = self.plan
        if plan is None:
            return Decision("wait", "no_worker")
        now = asyncio.get_running_loop().time()
        earliest = self._buffer.earliest()
        self._active_workers = len(self._pool.active)
        counts = Counts(
            gate_open=self._gate.is_open("train"),
            active_workers=self._active_workers,
            generating=self._rollouts.generating,
            unsettled_groups=self._ledger.unsettled_groups,
            continuable=int(earliest is not None and earliest <= now),
        )
        return decide(counts, required=plan.required, max_groups=plan.max_groups)

    async def _step(self) -> bool:
        """Start one group; returns whether there may be more to start."""
        decision = self._decide()
        if decision.action == "continue":
            group = self._buffer.next_unfinished(asyncio.get_running_loop().time())
            if group is not None:
                self._rollouts.start(group, self._runtimes[group.prompt.task])
            return True
        if decision.action == "wait":
            self._say(decision.reason)
            return False
        return await self._admit()

    async def _admit(self) -> bool:
        """Read ahead, then decide again: what was awaited may have changed everything."""
        lines = {name: line for name, source in self._sources.items() if (line := await source.peek()) is not None}
        task = next_task(self.admitted, {name: self._runtimes[name].weight for name in lines})
        if task is None:
            ended = self.waiting != "no_prompts" and self.exhausted
            self._say("no_prompts")
            if ended:
                self._buffer.changed()  # a take may have become hopeless
            return False
        line = lines[task]
        failure: SampleFailure | None = None
        ids: list[int] = []
        try:
            ids = await self._codec.encode_prompt(line)
        except SampleFailure as error:
            failure = error
        decision = self._decide()
        if decision.action != "admit":
            return decision.action == "continue"
        self._sources[task].advance()
        self._start(task, line, ids, failure)
        return True

    def _start(self, task: str, line: Mapping[str, Any], ids: list[int], failure: SampleFailure | None) -> None:
        prompt = Prompt(
            prompt_id=prompt_id(line),
            task=task,
            input_ids=ids,
            content=line.get("messages") or line.get("text"),
            ground_truth=line.get("ground_truth"),
            meta=dict(line.get("meta") or {}),
            engine_extra=dict(line.get("engine_extra") or {}),
        )
        group = Group(
            group_id=uuid.uuid4().hex,
            prompt=prompt,
            size=self._group_size,
            lane="train",
            ledger=self._ledger,
            now=asyncio.get_running_loop().time(),
        )
        self.admitted[task] += 1
        self._bus.emit(GroupAdmitted(group.group_id, task, self._group_size))
        if failure is not None:
            group.settle("failed", failure.reason)
            self._tally.settled[f"failed:{failure.reason}"] += 1
            self._bus.emit(GroupSettled(group.group_id, task, "failed", failure.reason))
            return
        self.waiting = ""
        self._rollouts.start(group, self._runtimes[task])

    def _say(self, reason: str) -> None:
        if reason != self.waiting:
            self.waiting = reason
            if reason not in ("target_reached", "max_groups", "gate_closed"):
                states = ", ".join(f"{w.worker_id}: {w.state} ({w.reason})" for w in self._pool.workers.values())
                self._bus.emit(ProducerWaiting(reason, states or "no workers"))

    def _rest(self) -> None:
        """Set the timer for the next group whose rest ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        earliest = self._buffer.earliest()
        loop = asyncio.get_running_loop()
        if earliest is not None and earliest > loop.time():
            self._timer = loop.call_at(earliest, self.wake)
