"""What producer shards ask of the other settings.

Invariant: whatever is left over after this can be divided: each shard has a worker, a group of every batch, and a share
of each limit that protects somebody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_svc.config.settings import Config

__all__ = ["shard_misfits"]


def shard_misfits(config: Config) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Name each setting that does not go with so many shards, and say why; nothing where there is one."""
    shards = config.producer.shards
    if shards == 1:
        return
    here = ("producer", "shards")
    if config.cluster is None:
        words = "give `cluster: ray` (`ray start --head` makes this machine one), or leave this out"
        yield here, f"{shards} shards are actors of a cluster: {words}"
    if config.buffer.path is None:
        words = (
            f"is required with {shards} shards: one that dies is started again while the others go on, and has its "
            "groups and its place among the prompts from there"
        )
        yield ("buffer", "path"), words
    if shards > len(config.workers):
        yield here, f"{shards} shards of {len(config.workers)} workers: each needs one"
    batch = config.trainer.train_batch_size
    if shards > batch:
        yield here, f"{shards} shards for batches of {batch} groups (trainer.train_batch_size): each needs one of them"
    for index, task in enumerate(config.tasks):
        for field, limit in (
            (("max_groups",), task.max_groups),
            (("judger", "concurrency"), task.judger.concurrency),
        ):
            if limit is not None and limit < shards:
                yield ("tasks", index, *field), f"{limit} cannot be divided among {shards} shards: each needs one"
