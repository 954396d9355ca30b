"""What the producer may do next: pure functions over counts.

The trainer's steps and the fleet's weights say how many batches the tokens made now can still serve (`room`): those of
the steps from the next one up to `version + max_staleness`, at most `max_staleness + 1`. The strategy says how many
groups may be out for them (`limit`); a group is *out* from its admission until it is leased or settled.

- `sync`: one batch at a time, begun only with weights that no step since their update has left behind.
- `async`: one batch and the budget for oversampling; a batch that is ready stops everything until it is taken.
- `disaggregated`: as many batches as there is room for. The target is cumulative: it counts what is out and never what
  was consumed or expired, so neither can confuse it.

Invariants:

- Nothing is started that must be too old when it is handed over, beyond the budget where every surplus is (`S = 0`).
- Groups that are out never exceed the limit by an admission; groups admitted and not consumed never `max_groups`.
- The budget is fixed: a group that fails, expires or is filtered left `out` and is replaced, no more.
- While a round of the tail is on, all that is out is what the next batch needs: the tail's groups first, then others.
- Requests under way reach the target of the plan and are started only below it.
- With no worker in traffic nothing is started, and while every group fails next to nothing: no prompt is used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Final, Literal, NamedTuple

from rollout_svc.config import Config, Strategy, TrainerConfig
from rollout_svc.plan import Plan

__all__ = [
    "WORDS",
    "Counts",
    "Decision",
    "Demand",
    "Rule",
    "TailCounts",
    "admittable",
    "decide",
    "describe",
    "first_window",
    "make_rule",
]

Action = Literal["continue", "admit", "tail", "wait"]
WaitReason = Literal[
    "",
    "gate_closed",
    "no_worker",
    "weights",
    "step_ahead",
    "batch_ready",
    "target_reached",
    "tail_round",
    "max_groups",
    "batch_under_way",
    "buffer_full",
    "every_group_fails",
    "no_prompts",
    "task_limit",
]
WORDS: Final[Mapping[str, str]] = {
    "gate_closed": "the stage is paused",
    "no_worker": "no engine is in traffic",
    "weights": "the next step needs the weights of the one before",
    "step_ahead": "whatever is made with these weights would be too old at the next step: update them",
    "batch_ready": "a batch is ready to be taken",
    "target_reached": "the engines run as many requests as planned",
    "tail_round": "groups of the tail go first, when there is room for them in the next batch",
    "max_groups": "as many groups are admitted and not consumed as the plan allows: acknowledge a batch",
    "batch_under_way": "as many groups are under way as the batches that these weights can serve",
    "buffer_full": "finished groups take as many bytes as buffer.max_bytes allows: acknowledge a batch",
    "every_group_fails": "groups keep failing, so new prompts rest",
    "no_prompts": "no prompt is there",
    "task_limit": "every task that has prompts has as many groups as its max_groups allows",
}
"""What each reason to wait means, for whoever waits for a batch."""


class Demand(NamedTuple):
    """What the trainers' takes and leases say.

    Attributes:
        version: of the fleet's weights.
        next_step: the step the next batch will be handed over at: the smallest that a take waits for; with nobody
            waiting the one after the last lease, or `version` where that is more.
        asked: groups the largest take waits for; 0: none waits.
    """

    version: int
    next_step: int
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How much may be out, by the trainer's settings.

    Attributes:
        strategy: how far generation may run ahead of training.
        batch: groups of one training batch.
        budget: groups to start beyond a batch.
        max_staleness: steps by which a group may be behind when it is handed over.
        update_interval: steps between two updates of the weights.
        required: requests per worker that the plan asks for.
        max_groups: the plan's bound on unsettled groups.
        max_token_staleness: steps by which a token may be behind and count; None: as many as its group.
    """

    strategy: Strategy
    batch: int
    budget: int
    max_staleness: int
    update_interval: int
    required: int
    max_groups: int
    max_token_staleness: int | None = None

    @property
    def serves(self) -> int:
        """Steps by which what is finished under one version may be behind: beyond, all its tokens would be masked."""
        return self.max_staleness if self.max_token_staleness is None else self.max_token_staleness

    def room(self, demand: Demand) -> int:
        """Batches that tokens made now can still serve; 0 or less: none.

        With `sync` the last of them is the last step before the next update.
        """
        bound = self.update_interval - 1 if self.strategy == "sync" else self.serves
        return min(bound + 1, bound + demand.version - demand.next_step + 1)

    def needed(self, demand: Demand) -> int:
        """Groups of the next batch."""
        return max(self.batch, demand.asked)

    def limit(self, demand: Demand) -> int:
        """Groups that may be out: the batches there is room for, within what the strategy allows."""
        room, needed = self.room(demand), self.needed(demand)
        if room <= 0:
            return 0
        if self.strategy == "sync":
            return needed
        # Where only the next step can be served the surplus of every batch expires: there the budget is for that.
        served = room * needed + (self.budget if self.serves == 0 else 0)
        return min(needed + self.budget, served) if self.strategy == "async" else served


def make_rule(strategy: Strategy, trainer: TrainerConfig, *, required: int, max_groups: int) -> Rule:
    """Make the rule of a trainer's settings; the budget is exact, as the plan's products are."""
    budget = ceil(trainer.train_batch_size * Fraction(repr(trainer.over_sample_threshold)))
    return Rule(
        strategy=strategy,
        batch=trainer.train_batch_size,
        budget=budget,
        max_staleness=trainer.max_staleness,
        update_interval=trainer.update_interval,
        required=required,
        max_groups=max_groups,
        max_token_staleness=trainer.max_token_staleness,
    )


def first_window(config: Config, plan: Plan) -> dict[str, str]:
    """Return what may be out at the start, in words."""
    trainer, tail = config.trainer, config.producer.tail_batch_size
    rule = make_rule(config.producer.strategy, trainer, required=plan.required, max_groups=plan.max_groups)
    demand = Demand(trainer.initial_version, trainer.initial_version)
    room = rule.room(demand)
    more = "" if rule.strategy == "sync" else f", {rule.budget} more for oversampling"
    return {
        "strategy": rule.strategy,
        "limit": f"{rule.limit(demand)} groups out: batches of {rule.batch}{more}",
        "window": f"{room} {'batch' if room == 1 else 'batches'} that tokens of one version can serve",
        "tail": "off" if tail is None else f"{tail} groups, after {config.producer.tail_after_aborts} aborts",
    }


@dataclass(frozen=True, slots=True)
class TailCounts:
    """The tail: what gathered, and the round that is on.

    Attributes:
        on: a round is on: some of its groups have not finished.
        left: groups and prompts of the round that have not been started.
        kept: whether the next of those is a group that is admitted already.
        ripe: enough has gathered for a round.
        gathered: groups and prompts that wait for one.
        gathered_groups: how many of those are groups, admitted already.
    """

    on: bool = False
    left: int = 0
    kept: bool = False
    ripe: bool = False
    gathered: int = 0
    gathered_groups: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What is the case now.

    Attributes:
        gate_open: whether anything may start.
        active_workers: workers in traffic.
        generating: samples in their agent loop.
        unsettled_groups: groups admitted and not consumed, filtered, expired or failed.
        continuable: unfinished groups whose rest is over.
        demand: what the trainers wait for.
        out: groups that are neither leased nor settled, without those that wait in the tail and those that are too old.
        ready: finished groups that may be handed over at the next step.
        tail: what gathered in the tail.
        resting: new prompts rest, because groups keep failing (`caution`).
        buffer_full: finished groups take as many bytes as they may.
        lacking: whether the mix of tasks lacks a group that can still come, however many are ready.
    """

    gate_open: bool
    active_workers: int
    generating: int
    unsettled_groups: int
    continuable: int
    demand: Demand
    out: int = 0
    ready: int = 0
    tail: TailCounts = TailCounts()
    resting: bool = False
    buffer_full: bool = False
    lacking: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: continue a group, admit a prompt, take the next of the tail, or wait, and why."""

    action: Action
    reason: WaitReason = ""


def decide(counts: Counts, rule: Rule) -> Decision:
    """Return the next step.

    Args:
        counts: what is the case.
        rule: what the trainer's settings allow.
    """
    if not counts.gate_open:
        return Decision("wait", "gate_closed")
    if counts.active_workers == 0:
        return Decision("wait", "no_worker")
    if rule.room(counts.demand) <= 0:
        return Decision("wait", "weights" if rule.strategy == "sync" else "step_ahead")
    if rule.strategy == "async" and counts.ready >= rule.needed(counts.demand) and not counts.lacking:
        return Decision("wait", "batch_ready")
    if counts.generating >= rule.required * counts.active_workers:
        return Decision("wait", "target_reached")
    tail = _tail(counts, rule)
    if tail is not None and tail.action == "tail":
        return tail
    if counts.continuable:
        return Decision("continue")
    return tail or _admission(counts, rule)


def _tail(counts: Counts, rule: Rule) -> Decision | None:
    """What the tail says; None: nothing."""
    tail = counts.tail
    if tail.on and tail.left:
        if counts.out >= rule.needed(counts.demand):
            return Decision("wait", "tail_round")
        if tail.kept:
            return Decision("tail")
        barred = _barred(counts, rule)
        return Decision("wait", barred) if barred else Decision("tail")
    # A full house whose rest waits in the tail would wait for ever: a round begins with what there is.
    full = counts.unsettled_groups >= rule.max_groups and tail.gathered_groups > 0
    return Decision("tail") if not tail.on and (tail.ripe or full) else None


def _barred(counts: Counts, rule: Rule) -> WaitReason:
    """Why no prompt at all may be admitted."""
    if counts.unsettled_groups >= rule.max_groups:
        return "max_groups"
    if counts.buffer_full:
        return "buffer_full"
    return "every_group_fails" if counts.resting else ""


def admittable(counts: Counts, rule: Rule) -> int:
    """Groups that may be admitted now, were there prompts and were fewer requests under way."""
    if not counts.gate_open or counts.active_workers == 0 or counts.buffer_full:
        return 0
    return max(0, min(rule.max_groups - counts.unsettled_groups, _limit(counts, rule) - counts.out))


def describe(counts: Counts, rule: Rule) -> dict[str, Any]:
    """What may be out, what is, and what waits in the tail: the record in `status`."""
    demand, tail = counts.demand, counts.tail
    return {
        "strategy": rule.strategy,
        "next_step": demand.next_step,
        "window": max(0, rule.room(demand)),
        "limit": rule.limit(demand),
        "out": counts.out,
        "tail": {"gathered": tail.gathered, "left": tail.left, "round": tail.on},
    }


def _limit(counts: Counts, rule: Rule) -> int:
    limit = rule.limit(counts.demand)
    return min(limit, rule.needed(counts.demand)) if counts.tail.on else limit


def _admission(counts: Counts, rule: Rule) -> Decision:
    if counts.unsettled_groups < rule.max_groups and counts.out >= _limit(counts, rule):
        return Decision("wait", "batch_under_way")
    barred = _barred(counts, rule)
    if not barred:
        return Decision("admit")
    # What the batch lacks may wait in the tail, which is given no company while nothing is admitted.
    lacking = counts.out < rule.needed(counts.demand)
    return (
        Decision("tail") if lacking and counts.tail.gathered_groups and not counts.tail.on else Decision("wait", barred)
    )
