"""The size of a sharded history, drawn from its seed: how many shards, and what each of them is.

Invariant: pure; equal seeds have equal shapes, and every shape is one that `split` takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Final

from rollout_svc.config import Config, TaskConfig, WorkerConfig
from rollout_svc.errors import ConfigError
from rollout_svc.sharding.split import ShardSettings, split
from tests.simulation.shape import Shape, draw_shape

__all__ = ["ShardedShape", "draw_sharded"]

_START_S: Final = (5.0, 20.0)  # for which a coordinator waits for all shards before it goes on with some


@dataclass(frozen=True, slots=True)
class ShardedShape:
    """One history's settings.

    Attributes:
        config: of the whole.
        parts: of each shard, as `split` makes them.
        shapes: of each shard, for its life.
        prompts: how many are pushed to each task in all.
    """

    config: Config
    parts: tuple[ShardSettings, ...]
    shapes: tuple[Shape, ...]
    prompts: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(task.name for task in self.config.tasks)

    @property
    def group_size(self) -> int:
        """Samples of a group."""
        return self.shapes[0].group_size


def draw_sharded(seed: int) -> ShardedShape:
    """Draw the shape of a seed: the first that can be divided."""
    for number in count():
        base = draw_shape(f"{seed}:{number}")
        if base.config.experts.enabled:
            continue  # heavy tensors have histories of their own
        config = _widened(base.config, Random(f"{seed}:{number}:sharded"))
        try:
            parts = split(config)
        except ConfigError:
            continue
        shapes = tuple(_shape_of(base, part) for part in parts)
        return ShardedShape(config, tuple(parts), shapes, prompts=6 * len(parts))
    raise AssertionError("count ends never")


def _widened(config: Config, rng: Random) -> Config:
    """Give it several shards, and what they need."""
    shards = rng.choice((2, 2, 2, 3, 4))
    engines = shards + rng.choice((0, 0, 1, 2))
    batch = max(config.trainer.train_batch_size, shards) + rng.choice((0, 0, 1, 3))
    urls = [f"http://10.0.0.{index + 1}:30000" for index in range(engines)]
    return config.model_copy(
        update={
            "workers": tuple(WorkerConfig(url=url, dialect="sglang") for url in urls),
            "trainer": config.trainer.model_copy(update={"train_batch_size": batch}),
            "tasks": tuple(_with_room(task, shards) for task in config.tasks),
            "producer": config.producer.model_copy(update={"shards": shards}),
            "buffer": config.buffer.model_copy(update={"path": "journal"}),
            "start_timeout_s": rng.choice(_START_S),
        }
    )


def _with_room(task: TaskConfig, shards: int) -> TaskConfig:
    """Raise its limits to what is asked of a configuration: one for each shard."""
    judger = task.judger
    if judger.concurrency is not None:
        judger = judger.model_copy(update={"concurrency": max(judger.concurrency, shards)})
    most = None if task.max_groups is None else max(task.max_groups, shards)
    return task.model_copy(update={"judger": judger, "max_groups": most})


def _shape_of(base: Shape, part: ShardSettings) -> Shape:
    """One shard's shape: its journal is the world's, and its engines are there when they are."""
    own = part.config.model_copy(
        update={"buffer": part.config.buffer.model_copy(update={"path": None}), "start_timeout_s": 600.0}
    )
    urls = tuple(worker.url for worker in own.workers if worker.url is not None)
    return replace(base, config=own, urls=urls, trainers=0, journalled=True)
