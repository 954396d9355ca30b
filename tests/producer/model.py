"""A producer without a loop, engines or time: the schedule and the tail followed over counts, one move at a time.

Whoever uses it is the trainer and the engines: takes, trains, updates, and says which running group ends next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.config import Strategy, TrainerConfig
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.plan import make_plan
from rollout_svc.producer.schedule import Counts, Decision, Demand, Rule, decide, make_rule
from rollout_svc.producer.staleness import doomed, refusal
from rollout_svc.producer.tail import Tail
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SampleStatus
from tests.support.groups import segment

__all__ = ["Model"]

_MANY = 10_000  # moves: more than any sequence of decisions needs
PLENTY = 10**6


class Model:
    """One stage and its trainer; groups have one sample each."""

    def __init__(
        self, strategy: Strategy, trainer: TrainerConfig, tail: Tail, prompts: int = PLENTY, required: int = PLENTY
    ) -> None:
        plan = make_plan(trainer, [None])
        self.rule: Rule = make_rule(strategy, trainer, required=required, max_groups=plan.max_groups)
        self.ledger, self.buffer, self.tail = Ledger(), ReplayBuffer(), tail
        self.running: list[Group] = []
        self.prompts = prompts
        self.version = self.step = self.admitted = self.used = self.batches = 0
        self.waiting = 0  # groups the take asks for; 0: none waits
        self.last: int | None = None
        self.expired: list[str] = []
        self.on_admission: Callable[[Counts], None] = lambda _: None

    # -- the producer ----------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        if self.waiting:
            return Demand(self.version, self.step, self.waiting)
        return Demand(self.version, max(self.version, 0 if self.last is None else self.last + 1))

    def counts(self) -> Counts:
        demand, ledger = self.demand(), self.ledger
        fresh = self.buffer.ready_since(demand.next_step - self.rule.max_staleness, demand.next_step - self.rule.serves)
        out = ledger.groups("in_flight") + ledger.groups("aborted") - self.tail.waiting_groups + fresh
        return Counts(
            gate_open=True,
            active_workers=1,
            generating=len(self.running),
            unsettled_groups=ledger.unsettled_groups,
            continuable=int(self.buffer.due(0.0)),
            demand=demand,
            out=out,
            ready=fresh,
            tail=self.tail.counts,
        )

    def produce(self) -> Decision:
        """Sweep, then do what the schedule says until it waits; returns why it does."""
        self._sweep()
        for _ in range(_MANY):
            counts = self.counts()
            decision = decide(counts, self.rule)
            if decision.action == "wait":
                return decision
            if not self._follow(decision, counts):
                return Decision("wait", "no_prompts")
        raise AssertionError("it never comes to rest")

    def _follow(self, decision: Decision, counts: Counts) -> bool:
        if decision.action == "continue":
            group = self.buffer.next_unfinished(0.0)
            assert group is not None
            if self.tail.wants(group):
                self.buffer.set_aside(group)
                self.tail.keep(group)
            else:
                self._start(group)
            return True
        if decision.action == "admit":
            if self.prompts == 0:
                self.tail.begin()
                return self.tail.peek() is not None
            self.prompts -= 1
            self.on_admission(counts)
            self._start(self._admit(Prompt(f"p{self.used}", "t", [1])))
            self.used += 1
            return True
        entry = self.tail.peek()
        if entry is None:
            self.tail.begin()
            assert self.tail.peek() is not None
            return True
        if isinstance(entry, Group):
            self.buffer.take_out(entry)
            group = entry
        else:
            self.on_admission(counts)
            group = self._admit(entry)
        self.tail.started(group)
        self._start(group)
        return True

    def _admit(self, prompt: Prompt) -> Group:
        self.admitted += 1
        return Group(group_id=f"g{self.admitted}", prompt=prompt, size=1, lane="train", ledger=self.ledger)

    def _start(self, group: Group) -> None:
        group.start()
        group.samples[0].hand_out()
        self.running.append(group)

    def _sweep(self) -> None:
        step = self.demand().next_step
        for group in [*self.buffer.unfinished_groups(), *self.running]:
            if doomed(group, step, self.rule.max_staleness):
                if group in self.running:
                    self.running.remove(group)
                else:
                    self.buffer.take_out(group)
                    self.tail.drop(group)
                self._expire(group)

    def _expire(self, group: Group) -> None:
        group.settle("expired", "stale")
        self.expired.append(group.prompt.prompt_id)
        self.tail.again(group)
        self.tail.ended(group.group_id)

    # -- the engines -----------------------------------------------------------------------------------------

    def finish(self, group: Group) -> None:
        """It is generated and judged."""
        self.running.remove(group)
        sample = group.samples[0]
        sample.extend(sample.attempt, segment([7], self.version))
        sample.transition(sample.attempt, SampleStatus.GENERATED)
        sample.transition(sample.attempt, SampleStatus.JUDGING)
        sample.grade(sample.attempt, 1.0, {})
        group.finish(1.0)
        self.tail.ended(group.group_id)
        self.buffer.put_ready(group)

    def fail(self, group: Group) -> None:
        """It fails for good."""
        self.running.remove(group)
        group.settle("failed", "judge_error")
        self.tail.ended(group.group_id)

    def pause(self, version: int) -> None:
        """Cut all that runs, bring weights, and open again."""
        for group in self.running:
            sample = group.samples[0]
            sample.extend(sample.attempt, segment([7], self.version))
            group.hand_back()
            group.cuts += 1
            self.buffer.put_back(group)
        self.running.clear()
        self.version = version

    # -- the trainer -----------------------------------------------------------------------------------------

    def take(self) -> list[str] | None:
        """Hand over what was asked for, oldest first; None: not enough is fresh. What is too old expires."""
        fresh = []
        for group in list(self.buffer.ready_groups()):
            if refusal(group, self.step, self.rule.max_staleness):
                self.buffer.drop_ready(group)
                self._expire(group)
            else:
                fresh.append(group)
        fresh.sort(key=lambda group: group.oldest)
        if len(fresh) < self.waiting:
            return None
        lease = self.buffer.lease(f"b{self.batches}", self.step, fresh[: self.waiting], 1e9)
        self.batches += 1
        self.last, self.waiting = self.step, 0
        self.step += 1
        return [group.prompt.prompt_id for group in lease.groups]

    def train(self) -> None:
        """Acknowledge what was taken, and bring new weights where it is time."""
        self.buffer.acknowledge(f"b{self.batches - 1}")
        if self.step - self.version >= self.rule.update_interval:
            self.pause(self.step)

    def batch(self, choose: Callable[[list[Group]], Group]) -> list[str]:
        """Take a batch: groups end as `choose` says until there is one."""
        self.waiting = self.waiting or self.rule.batch
        for _ in range(_MANY):
            taken = self.take()
            if taken is not None:
                return taken
            why = self.produce()
            alive = self.running or self.buffer.ready >= self.waiting
            assert alive, f"nothing runs, and it waits: {why} {self.counts()}"
            if self.running:
                self.finish(choose(self.running))
        raise AssertionError("the take is never met")

    def waiting_prompts(self) -> Iterator[str]:
        """Prompts that are neither settled nor lost: in groups that live, or in the tail."""
        for prompt in self.tail.prompts():
            yield prompt.prompt_id
        for group in [*self.running, *self.buffer.unfinished_groups(), *self.buffer.ready_groups()]:
            yield group.prompt.prompt_id
