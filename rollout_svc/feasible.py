"""Settings that cannot work together, refused before anything starts, with the arithmetic: pure.

A bound is held against the step at which it bites: with an update every `update_interval` steps, the last step before
an update is `update_interval - 1` steps after the weights that made its tokens.

Invariants:

- What is refused could never work: no batch, no partial, no masked token, no round of the tail would ever come of it.
- Each problem is at the setting to change, and says the numbers and what would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollout_svc.config import ProducerConfig, Strategy, TaskConfig, TrainerConfig
from rollout_svc.errors import Problem

__all__ = ["infeasible", "partials_usable", "remarks"]

_DEFAULTS: Final = ProducerConfig()


def infeasible(trainer: TrainerConfig, producer: ProducerConfig, tasks: Sequence[TaskConfig]) -> list[Problem]:
    """Return what can never work; empty where nothing stands in the way."""
    return [*_bounds(trainer), *_partials(trainer, producer, tasks), *_tail(trainer, producer), *_room(trainer, tasks)]


def partials_usable(trainer: TrainerConfig, strategy: Strategy) -> bool:
    """Whether a sample that the pause for an update cut can still be handed over.

    With `sync` none is cut by one: nothing is begun that the batch in hand does not need.
    """
    return trainer.max_staleness > 0 or strategy == "sync"


def remarks(trainer: TrainerConfig, strategy: Strategy, tasks: Sequence[TaskConfig]) -> tuple[str, ...]:
    """Return what follows from the settings although nobody asked for it."""
    unset = [task.name for task in tasks if task.partial_rollout is None]
    if partials_usable(trainer, strategy) or not unset:
        return ()
    said = f"aborted samples of {', '.join(unset)} are made again from their prompts (partial_rollout: false)"
    return (f"max_staleness 0: what the pause for an update cuts is 1 step behind afterwards, so {said}",)


def _bounds(trainer: TrainerConfig) -> list[Problem]:
    bound, tokens, last = trainer.max_staleness, trainer.max_token_staleness, trainer.update_interval - 1
    interval = f"with update_interval {trainer.update_interval} the last step before an update is {last} behind"
    problems = []
    if bound < last:
        problems.append(
            Problem(
                "trainer.max_staleness",
                f"{interval} its weights, and {bound} is the most a group may be: no batch could ever be handed over "
                f"there; give at least {last}, or update more often",
            )
        )
    if tokens is not None and tokens > bound:
        problems.append(
            Problem(
                "trainer.max_token_staleness",
                f"{tokens} is more than max_staleness {bound}: a group with a token that old expires as a whole, so "
                "nothing would ever be masked",
            )
        )
    elif tokens is not None and tokens < last:
        problems.append(
            Problem(
                "trainer.max_token_staleness",
                f"{interval} its weights, and tokens behind by more than {tokens} are masked: nothing would be left "
                f"there; give at least {last}",
            )
        )
    return problems


def _partials(trainer: TrainerConfig, producer: ProducerConfig, tasks: Sequence[TaskConfig]) -> list[Problem]:
    if partials_usable(trainer, producer.strategy):
        return []
    return [
        Problem(
            f"tasks.{index}.partial_rollout",
            "what the pause for an update cuts has tokens of version v and goes on under v + 1: 1 step behind, and "
            "max_staleness is 0, so no partial could ever be used; leave it out, or give max_staleness 1",
        )
        for index, task in enumerate(tasks)
        if task.partial_rollout
    ]


def _tail(trainer: TrainerConfig, producer: ProducerConfig) -> list[Problem]:
    size, batch = producer.tail_batch_size, trainer.train_batch_size
    if size is None:
        unused = producer.tail_after_aborts != _DEFAULTS.tail_after_aborts
        message = "has no use without producer.tail_batch_size"
        return [Problem("producer.tail_after_aborts", message)] if unused else []
    if size > batch:
        message = f"{size} groups that go first do not fit in one batch of {batch}: its round could never be whole"
        return [Problem("producer.tail_batch_size", message)]
    return []


def _room(trainer: TrainerConfig, tasks: Sequence[TaskConfig]) -> list[Problem]:
    limits = [task.max_groups for task in tasks if task.max_groups is not None]
    if not tasks or len(limits) < len(tasks) or sum(limits) >= trainer.train_batch_size:
        return []
    message = (
        f"the tasks may have {' + '.join(map(str, limits))} = {sum(limits)} groups at once, a batch needs "
        f"{trainer.train_batch_size}: none could ever be filled"
    )
    return [Problem("tasks.0.max_groups", message)]
