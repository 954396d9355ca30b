"""The producing loop: keeps the fleet at its target, and waits for events, never for time alone.

Invariants:

- Deciding and starting are one step without an await: nothing is started after the gate closed.
- It never waits for a source: one that has nothing now says when it has, and holds up nobody.
- What to start is decided from counts alone (`schedule`); what cannot be handed over any more is not gone on with.
- A prompt is used up in the same step that admits it; a loop that is stopped anywhere loses none.
- Whatever could change the decision calls `wake`; what rests, groups or new prompts, sets the one timer there is.
- While nothing can be started the loop says why, once per reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Position, Storage
from rollout_svc.chat_template import BAD_PROMPT
from rollout_svc.config import Strategy, TrainerConfig
from rollout_svc.errors import SampleFailure
from rollout_svc.events import EventBus, GroupFinished, GroupSettled, SourceSkips
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.plan import Plan
from rollout_svc.producer.admission import Admission, prompt_of
from rollout_svc.producer.caution import Cautions
from rollout_svc.producer.expiry import EarlyCancel
from rollout_svc.producer.lines import PromptLine
from rollout_svc.producer.mixture import Mixture, Share
from rollout_svc.producer.returned import returned_first
from rollout_svc.producer.schedule import Counts, Decision, Demand, Rule, admittable, decide, describe, make_rule
from rollout_svc.producer.sources import PromptSource
from rollout_svc.producer.tail import Tail
from rollout_svc.producer.waiting import Waiting
from rollout_svc.prompt import Prompt
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling
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
        storage: Storage,
        settling: Settling,
        runtimes: Mapping[str, TaskRuntime],
        sources: Mapping[str, PromptSource],
        strategy: Strategy,
        tail: Tail,
        new_id: Callable[[], str],
    ) -> None:
        self.rule: Rule | None = None
        self.demand: Callable[[], Demand] = lambda: Demand(0, 0)
        self.tail = tail
        self._gate = gate
        self._pool = pool
        self._rollouts = rollouts
        self._buffer = buffer
        self._ledger = ledger
        self._bus = bus
        self._codec = codec
        self._settling = settling
        self._runtimes = runtimes
        self._sources = sources
        self._strategy: Strategy = strategy
        self._early = EarlyCancel(
            gate=gate, rollouts=rollouts, buffer=buffer, settling=settling, tail=tail, runtimes=runtimes
        )
        self._active_workers = 0
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0  # loop time of the last step: what rested then is still to be woken for
        self._caution = Cautions(runtimes)
        self._admission = Admission(
            ledger=ledger,
            buffer=buffer,
            storage=storage,
            settling=settling,
            tally=tally,
            bus=bus,
            caution=self._caution,
            new_id=new_id,
        )
        self.mixture = Mixture(
            shares={name: Share(runtime.weight, runtime.max_groups) for name, runtime in runtimes.items()},
            ledger=ledger,
            feeding=self,
        )
        tail.barred, tail.stranded = self.mixture.at_limit, self.mixture.stranded
        self._waiting = Waiting(bus, buffer, pool, self._caution)
        bus.subscribe(GroupFinished, self._finished)
        bus.subscribe(GroupSettled, self._settled)

    @property
    def waiting(self) -> str:
        """Why nothing is started; empty: something was, last."""
        return self._waiting.reason

    @property
    def sources(self) -> Mapping[str, PromptSource]:
        """Where prompts come from, by task."""
        return self._sources

    @property
    def exhausted(self) -> bool:
        """Whether no source will ever give another prompt."""
        return all(source.exhausted for source in self._sources.values())

    # -- what the mix has to know ----------------------------------------------------------------------------

    @property
    def flowing(self) -> bool:
        """Whether groups under way go on: a lane that is open, and a worker in traffic."""
        return self._gate.is_open("train") and bool(self._pool.in_traffic)

    def admittable(self) -> int:
        """Groups that could be admitted now, were there prompts: requests that have to end first are no obstacle."""
        return 0 if self.rule is None else admittable(self.counts(self.rule), self.rule)

    def held_back(self, task: str) -> int:
        """Groups of this task that wait in the tail: nobody can wait for them."""
        return self.tail.held_back(task)

    def obstacle(self, task: str) -> str:
        """Why no prompt of this task can be admitted now, whatever room there is; empty: one can."""
        source = self._sources[task]
        try:
            line = source.peek()
        except Exception:  # noqa: BLE001 - the loop meets it too, and ends of it
            return "failed"
        if line is None:
            return "exhausted" if source.exhausted else "no_prompts"
        resting = self._caution.rests(task, asyncio.get_running_loop().time())
        return "every_group_fails" if resting else ""

    # -- producing -------------------------------------------------------------------------------------------

    def follow(self, plan: Plan, trainer: TrainerConfig) -> None:
        """Follow another plan from now on; groups under way keep their size."""
        rule = self.rule = make_rule(self._strategy, trainer, required=plan.required, max_groups=plan.max_groups)
        self._waiting.batch = rule.batch
        self._admission.group_size = trainer.prompt_repeat_k
        self.wake()

    def weights_went_to(self, version: int) -> None:
        """An update has landed."""
        self._early.weights_went_to(version)

    def return_first(self, prompts: Iterable[Prompt]) -> None:
        """Admit these before what the sources of their tasks give; before `run`."""
        self._sources = returned_first(self._sources, prompts)

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    def room(self) -> None:
        """A generation ended: look again if that brought the fleet below its target; asked once per sample."""
        if self.rule is not None and self._rollouts.generating < self.rule.required * self._active_workers:
            self._wake.set()

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def run(self) -> None:
        """Produce until cancelled."""
        try:
            for task, source in self._sources.items():
                source.open(self._source_changed)
                if source.skips:
                    self._bus.emit(SourceSkips(task, source.skips))
            await self._produce()
        finally:
            for source in self._sources.values():
                source.close()
            self._cancel_timer()

    async def _produce(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.rule is not None:
                await self._early.sweep(self.demand(), self.rule.max_staleness)
            started = 0
            while await self._step():
                started += 1
                if started % _SLICE == 0:
                    await asyncio.sleep(0)
            self._rest()

    def counts(self, rule: Rule) -> Counts:
        """What is the case now."""
        now = asyncio.get_running_loop().time()
        ledger, demand, tail = self._ledger, self.demand(), self.tail
        self._active_workers = self._pool.in_traffic
        fresh = self._buffer.ready_since(demand.next_step - rule.max_staleness, demand.next_step - rule.serves)
        under_way = ledger.groups("queued") + ledger.groups("in_flight") + ledger.groups("aborted")
        return Counts(
            gate_open=self._gate.is_open("train"),
            active_workers=self._active_workers,
            generating=self._rollouts.generating,
            unsettled_groups=ledger.unsettled_groups,
            continuable=int(self._buffer.due(now)),
            demand=demand,
            out=under_way - tail.waiting_groups + fresh,
            ready=fresh,
            tail=tail.counts,
            resting=self._caution.resting(now),
            buffer_full=self._buffer.full,
        )

    def describe(self) -> dict[str, Any] | None:
        """What may be out, what is, and what waits in the tail."""
        return None if self.rule is None else describe(self.counts(self.rule), self.rule)

    def _decide(self) -> Decision:
        rule = self.rule
        if rule is None:
            return Decision("wait", "no_worker")
        counts = self.counts(rule)
        demand = counts.demand
        if rule.strategy == "async" and counts.ready >= (needed := rule.needed(demand)):
            # As the take counts that waits: a batch of another size may need nobody whom that one waits for.
            counts = replace(counts, lacking=bool(self.mixture.missing(demand.asked or needed)))
        return decide(counts, rule)

    async def _step(self) -> bool:
        """Start one group; returns whether there may be more to start."""
        self._looked_at = asyncio.get_running_loop().time()
        decision = self._decide()
        if decision.action == "continue":
            self._continue()
            return True
        if decision.action == "tail":
            return self._follow_tail()
        if decision.action == "wait":
            self._waiting.say(decision.reason)
            return False
        return await self._admit()

    def _continue(self) -> None:
        """Go on with the oldest unfinished group, unless it has to expire, or belongs in the tail."""
        group = self._buffer.next_unfinished(asyncio.get_running_loop().time())
        if group is None:
            return
        if self.tail.wants(group):
            self._buffer.set_aside(group)
            self.tail.keep(group)
            self._buffer.changed()  # a take may have waited for it, which is not to be waited for any more
        elif not self._expires(group):
            self._run(group)

    def _expires(self, group: Group) -> bool:
        """End a group that is in nobody's hands if no step can take it any more."""
        rule = self.rule
        reason = None if rule is None else self._early.doomed(group, self.demand().next_step, rule.max_staleness)
        if reason is not None:
            self._settling.settle(group, "expired", reason)
            self._buffer.changed()
        return reason is not None

    def _follow_tail(self) -> bool:
        """Begin a round of the tail, or start the next of the one that is on; returns whether there was anything."""
        entry = self.tail.peek()
        if entry is None:
            self.tail.begin()
            return self.tail.peek() is not None
        if isinstance(entry, Group):
            self._buffer.take_out(entry)
            if self._expires(entry):
                self.tail.drop(entry)
            else:
                self.tail.started(entry)
                self._run(entry)
            return True
        if self.mixture.at_limit(entry.task):
            self.tail.defer()
            return True
        group = self._admission.enter(entry, None)
        self.tail.started(group)
        self._run(group)
        return True

    async def _admit(self) -> bool:
        """Encode a prompt, then decide again: what was awaited may have changed everything."""
        lines = {name: line for name, source in self._sources.items() if (line := source.peek()) is not None}
        obstacles = {name: self.mixture.obstacle(name) for name in lines}
        task = self.mixture.next_task([name for name, obstacle in obstacles.items() if not obstacle])
        if task is None:
            return self._without_prompts(obstacles.values())
        line = lines[task]
        failure = None if line.problem is None else SampleFailure(BAD_PROMPT, line.problem)
        ids: list[int] = []
        if failure is None:
            try:
                ids = await self._codec.encode_prompt(line.content)
            except SampleFailure as error:
                failure = error
        decision = self._decide()
        if decision.action != "admit":
            return decision.action != "wait"
        self._start(task, line, ids, failure, self._sources[task].advance())
        return True

    def _without_prompts(self, obstacles: Collection[str]) -> bool:
        """No task can give a prompt: the tail waits for no more company; returns whether something may be started."""
        self.tail.begin()
        if self.tail.peek() is not None:
            return True
        for reason in ("every_group_fails", "task_limit"):
            if reason in obstacles:
                self._waiting.say(reason)
                return False
        ended = self.waiting != "no_prompts" and self.exhausted
        self._waiting.say("no_prompts")
        if ended:
            self._buffer.changed()  # a take may have become hopeless
        return False

    def _start(
        self, task: str, line: PromptLine, ids: list[int], failure: SampleFailure | None, position: Position | None
    ) -> None:
        group = self._admission.enter(prompt_of(line, task, ids), position)
        if failure is None:
            self._run(group)
        else:
            self._admission.fail(group, failure)

    def _run(self, group: Group) -> None:
        self._waiting.over()
        self._rollouts.start(group, self._runtimes[group.prompt.task])

    # -- what changes the decision ---------------------------------------------------------------------------

    def _source_changed(self) -> None:
        self.wake()
        self._tell_if_exhausted()

    def _tell_if_exhausted(self) -> None:
        """Whoever waits for a batch has to know that no more prompts come."""
        if self.exhausted:
            self._buffer.changed()

    def _finished(self, event: GroupFinished) -> None:
        self._waiting.warned = False
        if self.tail.ended(event.group_id):
            self.wake()
        if self._caution.finished(event.task):
            self.wake()

    def _settled(self, event: GroupSettled) -> None:
        self.tail.ended(event.group_id)
        if event.outcome == "failed":
            self._caution.failed(event.task, event.reason or "", asyncio.get_running_loop().time())
            self._tell_if_exhausted()
        self.wake()  # one group less, or the beginning of a rest

    def _rest(self) -> None:
        """Set the timer for what rests and may go on next."""
        self._cancel_timer()
        # By the last look, not by now: a rest that ended in between was not seen to, and nobody else may wake it.
        rests = [
            at for at in (self._buffer.rests_until(), *self._caution.ends()) if at is not None and at > self._looked_at
        ]
        if rests:
            self._timer = asyncio.get_running_loop().call_at(min(rests), self.wake)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
