"""How many groups of each task make a batch: pure arithmetic over weights and counts.

Largest remainder (Hamilton, 1792) with the remainders carried over batches, so that rounding evens out.

Invariants:

- The quotas of a batch add up to its groups. While every task can fill its own, what was handed over is at every batch
  less than one group away from each task's share, for every task.
- A task whose groups can still come is waited for; one whose groups cannot is filled in for by the others, and its
  carry remembers, one batch's worth of its share at most: who was away does not crowd out everybody else afterwards.
- Whoever is waited for has groups under way, or room for another: a batch never waits for nobody.
- Failed, filtered and expired groups count nowhere here: what is lost is only missing, and is made again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Supply", "carried", "most_behind", "needs", "quotas", "waits_for"]


@dataclass(frozen=True, slots=True)
class Supply:
    """What a task has, and what it can bring.

    Attributes:
        weight: its share, relative to the others'.
        ready: finished groups that wait for a trainer.
        out: those, and the ones under way.
        coming: groups that are not ready and can still be: under way, or to be admitted now.
        present: it has a prompt to give, or groups out; others take no part in the mix.
    """

    weight: float
    ready: int
    out: int
    coming: int
    present: bool = True


def quotas(groups: int, weights: Mapping[str, float], carry: Mapping[str, float]) -> dict[str, int]:
    """Divide `groups` among tasks by largest remainder; they add up to `groups`, or to 0 without tasks.

    Args:
        groups: size of the batch.
        weights: share by task, each above 0.
        carry: groups that each task is owed (below 0: was given ahead) from the batches before.
    """
    wanted = _wanted(groups, weights, carry)
    given = {task: max(0, math.floor(number)) for task, number in wanted.items()}
    while given and (left := groups - sum(given.values())):
        # Ties go by name, so that the same counts give the same batch in every process.
        if left > 0:
            task = min(given, key=lambda name: (given[name] - wanted[name], name))
            given[task] += 1
        else:  # some are so far ahead that the others were given too much between them
            task = min((name for name in given if given[name]), key=lambda name: (wanted[name] - given[name], name))
            given[task] -= 1
    return given


def _wanted(groups: int, weights: Mapping[str, float], carry: Mapping[str, float]) -> dict[str, float]:
    """Each task's share of a batch, with what it is owed; the sum is `groups`, whatever was clipped or is away."""
    total = sum(weights.values())
    astray = sum(carry.get(task, 0.0) for task in weights)
    return {task: (groups - astray) * weight / total + carry.get(task, 0.0) for task, weight in weights.items()}


def needs(groups: int, supplies: Mapping[str, Supply], carry: Mapping[str, float]) -> dict[str, int]:
    """How many groups of each task make the batch, where what cannot come is filled in by the others.

    They add up to less than `groups` only where all tasks together cannot bring that many.
    """
    open_ = {task: supply.weight for task, supply in supplies.items() if supply.present}
    needed: dict[str, int] = {}
    left = groups
    while open_:
        given = quotas(left, open_, carry)
        short = {task: most for task in open_ if given[task] > (most := supplies[task].ready + supplies[task].coming)}
        if not short:
            return needed | given
        needed |= short
        left -= sum(short.values())
        open_ = {task: weight for task, weight in open_.items() if task not in short}
    return needed


def waits_for(groups: int, supplies: Mapping[str, Supply], carry: Mapping[str, float]) -> dict[str, int]:
    """Groups that are missing for the batch, by task; empty: it can be chosen, or nobody can bring what it lacks."""
    needed = needs(groups, supplies, carry)
    return {task: number - supplies[task].ready for task, number in needed.items() if number > supplies[task].ready}


def carried(
    groups: int, supplies: Mapping[str, Supply], carry: Mapping[str, float], taken: Mapping[str, int]
) -> dict[str, float]:
    """What each task is owed after a batch: its share and what it was owed, less what was taken of it.

    Rounding leaves less than one group. Beyond that it is kept to one batch's worth of the task's share; the carry of a
    task that took no part stays as it is.
    """
    weights = {task: supply.weight for task, supply in supplies.items() if supply.present}
    total = sum(weights.values())
    left = dict(carry)
    for task, wanted in _wanted(groups, weights, carry).items():
        most = max(1.0, groups * weights[task] / total)
        left[task] = min(most, max(-most, wanted - taken.get(task, 0)))
    return left


def most_behind(
    groups: int, supplies: Mapping[str, Supply], carry: Mapping[str, float], able: Collection[str]
) -> str | None:
    """The task whose next prompt is needed first, of those `able` to give one; None: there is none.

    First a task that has fewer groups out than the next batch needs of it; then the one whose next group would be
    handed over earliest. Only what is out counts, not what ever was: what failed, was filtered or expired is missing
    and nothing else, and a task that had no prompts for long does not crowd out the others when it has some again.
    """
    needed = needs(groups, supplies, carry)
    missing = [task for task in able if supplies[task].out < needed.get(task, 0)]
    return min(
        missing or able,
        key=lambda task: ((supplies[task].out + 1 - carry.get(task, 0.0)) / supplies[task].weight, task),
        default=None,
    )
