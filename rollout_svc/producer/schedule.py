"""What the producer may do next: pure functions over counts.

Invariants:

- Work under way is continued before anything new is admitted.
- Requests under way reach the target of the plan and are started only below it.
- Groups admitted and not consumed never exceed `plan.max_groups`.
- With no worker in traffic nothing is started, and while every group fails next to nothing: no prompt is used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Counts", "Decision", "decide"]

Action = Literal["continue", "admit", "wait"]
WaitReason = Literal[
    "",
    "gate_closed",
    "no_worker",
    "target_reached",
    "max_groups",
    "buffer_full",
    "every_group_fails",
    "step_ahead",
    "no_prompts",
    "task_limit",
]


@dataclass(frozen=True, slots=True)
class Counts:
    """What is the case now.

    Attributes:
        gate_open: whether anything may start.
        active_workers: workers in traffic.
        generating: samples in their agent loop.
        unsettled_groups: groups admitted and not consumed, filtered, expired or failed.
        continuable: unfinished groups whose rest is over.
        resting: new prompts rest, because groups keep failing (`caution`).
        buffer_full: finished groups take as many bytes as they may.
        doomed: a take waits for a step so far ahead of the weights that whatever is begun now must expire.
    """

    gate_open: bool
    active_workers: int
    generating: int
    unsettled_groups: int
    continuable: int
    resting: bool = False
    buffer_full: bool = False
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: continue a group, admit a prompt, or wait, and why."""

    action: Action
    reason: WaitReason = ""


def decide(counts: Counts, *, required: int, max_groups: int) -> Decision:
    """Return the next step.

    Args:
        counts: what is the case.
        required: requests per worker the plan asks for.
        max_groups: the plan's bound on unsettled groups.
    """
    if not counts.gate_open:
        return Decision("wait", "gate_closed")
    if counts.active_workers == 0:
        return Decision("wait", "no_worker")
    if counts.generating >= required * counts.active_workers:
        return Decision("wait", "target_reached")
    if counts.continuable:
        return Decision("continue")
    if counts.unsettled_groups >= max_groups:
        return Decision("wait", "max_groups")
    if counts.buffer_full:
        return Decision("wait", "buffer_full")
    if counts.resting:
        return Decision("wait", "every_group_fails")
    if counts.doomed:
        return Decision("wait", "step_ahead")
    return Decision("admit")
