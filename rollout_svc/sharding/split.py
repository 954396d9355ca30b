"""The settings of each shard, from those of the whole: pure.

What is divided by capacity is divided by the requests that a shard's engines run at once.

Invariants:

- Every worker is one shard's; every shard has one at least.
- Over all shards the groups of a batch, the groups beyond it, and so the groups that may be admitted and not consumed
  are those of the whole, exactly.
- A limit that protects somebody else (a task's groups, a judger's calls, bytes) is never exceeded by the sum. What only
  costs room here (processes of judges, evaluations, sessions) is divided, and one at least for each.
- A shard ends no lease of its own accord: whether a batch is over is the coordinator's to say. An ack that was accepted
  in time holds however long the shard, or all of them, are away.
- Files have a name for each shard: the whole's, with the shard's behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Final

from rollout_svc.config import Config, Portion, TaskConfig, TrainerConfig, WorkerConfig
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.feasible import infeasible
from rollout_svc.plan import batch_of

__all__ = ["ShardSettings", "apportion", "deal", "shard_for", "shard_trainers", "split"]

_YEAR_S: Final = 31_536_000.0  # the longest time a setting may have: as good as for ever
_DIGITS: Final = 9  # of a fraction of a batch: batches are far smaller than 10**9 groups


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """One shard.

    Attributes:
        shard_id: `s0`, `s1`, ….
        config: its settings, those of a service without shards.
        portion: its share of the prompts that are read.
        workers: which of the whole's workers are its own, by their place there.
    """

    shard_id: str
    config: Config
    portion: Portion
    workers: tuple[int, ...]


def split(config: Config) -> list[ShardSettings]:
    """Divide the settings among `producer.shards` shards.

    Raises:
        ConfigError: at `producer.shards`: a shard's settings would not work, although the whole's do.
    """
    count = config.producer.shards
    sizes = [_size(worker, config.trainer) for worker in config.workers]
    hands = deal(sizes, count)
    capacities = [sum(sizes[index] for index in hand) for hand in hands]
    trainers = shard_trainers(config.trainer, capacities)
    batches = [trainer.train_batch_size for trainer in trainers]
    tasks = [_tasks(config.tasks, index, batches) for index in range(count)]
    parts: list[ShardSettings] = []
    problems: list[Problem] = []
    for index, (hand, trainer) in enumerate(zip(hands, trainers, strict=True)):
        sections = _sections(config, index, capacities, batches)
        update = sections | {
            "workers": tuple(config.workers[place] for place in hand),
            "trainer": trainer,
            "tasks": tasks[index],
        }
        own = config.model_copy(update=update)
        parts.append(ShardSettings(f"s{index}", own, Portion(index, count), tuple(hand)))
        problems += [
            Problem("producer.shards", f"of {count} shards s{index} could not work: {problem.path}: {problem.message}")
            for problem in infeasible(own.trainer, own.producer, own.tasks)
        ]
    if problems:
        raise ConfigError(problems)
    return parts


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal workers out so that capacities come close to each other; returns each shard's places, in order."""
    hands: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = min(range(count), key=lambda shard: (bool(hands[shard]), held[shard], len(hands[shard]), shard))
        hands[least].append(place)
        held[least] += sizes[place]
    return [sorted(hand) for hand in hands]


def shard_for(capacities: Sequence[int], batches: Sequence[int]) -> int:
    """Say which shard a later worker goes to: where there is least capacity for each group of a batch."""
    return min(range(len(batches)), key=lambda shard: (Fraction(capacities[shard], batches[shard]), shard))


def shard_trainers(trainer: TrainerConfig, capacities: Sequence[int]) -> list[TrainerConfig]:
    """Divide a batch, and what is started beyond it, by capacity.

    Args:
        trainer: the whole's; its batch has a group for each shard at least.
        capacities: requests that each shard's engines run at once.
    """
    batches = apportion(trainer.train_batch_size, capacities)
    over = ceil(trainer.train_batch_size * Fraction(repr(trainer.over_sample_threshold)))
    more = apportion(over, batches, least=0)
    return [
        trainer.model_copy(update={"train_batch_size": batch, "over_sample_threshold": _threshold(extra, batch)})
        for batch, extra in zip(batches, more, strict=True)
    ]


def apportion(total: int, weights: Sequence[int], least: int = 1) -> list[int]:
    """Divide a whole number by weights, by largest remainder; each gets `least`, if there is enough for all."""
    whole = sum(weights) or len(weights)
    quotas = [Fraction(total * (weight if sum(weights) else 1), whole) for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_rest = sorted(range(len(weights)), key=lambda index: (shares[index] - quotas[index], index))
    for index in by_rest[: total - sum(shares)]:
        shares[index] += 1
    while min(shares) < least <= total // len(shares):
        shares[shares.index(min(shares))] += 1
        shares[shares.index(max(shares))] -= 1
    return shares


def _threshold(extra: int, batch: int) -> float:
    """Return the fraction of a batch that comes to so many groups, as `ceil` counts them, and to none more."""
    digits = 10**_DIGITS
    return float(Fraction(extra * digits // batch, digits))


def _size(worker: WorkerConfig, trainer: TrainerConfig) -> int:
    return batch_of(worker.max_batch, len(worker.behind), trainer) or trainer.max_batch_per_worker


def _sections(config: Config, index: int, capacities: list[int], batches: list[int]) -> dict[str, Any]:
    """The sections that differ, of one shard."""
    count = len(batches)

    def own(total: int) -> int:
        return max(1, apportion(total, capacities)[index])

    def filed(path: str | None) -> str | None:
        return None if path is None else f"{path}.s{index}"

    tail, max_bytes = config.producer.tail_batch_size, config.buffer.max_bytes
    changes: dict[str, dict[str, Any]] = {
        "service": {"port": 0, "public_url": None},
        "producer": {
            "shards": 1,
            "tail_batch_size": None if tail is None else max(1, apportion(tail, batches, least=0)[index]),
        },
        "judges": {"processes": own(config.judges.processes)},
        "evaluation": {"max_in_flight": own(config.evaluation.max_in_flight)},
        "sessions": {"max": own(config.sessions.max)},
        "buffer": {
            "path": filed(config.buffer.path),
            "max_bytes": None if max_bytes is None else max(1, max_bytes // count),
            "lease_s": _YEAR_S,
        },
        "trajectories": {"path": filed(config.trajectories.path)},
    }
    return {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}


def _tasks(tasks: Sequence[TaskConfig], index: int, batches: list[int]) -> tuple[TaskConfig, ...]:
    return tuple(task.model_copy(update=dict(_limits(task, index, batches))) for task in tasks)


def _limits(task: TaskConfig, index: int, batches: list[int]) -> Iterator[tuple[str, Any]]:
    """A task's limits, of one shard: nobody else is to notice that there are several."""
    if task.max_groups is not None:
        yield "max_groups", apportion(task.max_groups, batches)[index]
    judger: dict[str, Any] = {}
    if task.judger.concurrency is not None:
        judger["concurrency"] = apportion(task.judger.concurrency, batches)[index]
    if task.judger.requests_per_minute is not None:
        judger["requests_per_minute"] = task.judger.requests_per_minute * batches[index] / sum(batches)
    if judger:
        yield "judger", task.judger.model_copy(update=judger)
