"""A coordinator over shards made of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from rollout_svc.config import Config
from rollout_svc.sharding.coordinator import Coordinator
from tests.support.memory_shards import MemoryShard

__all__ = ["DISK", "check_books", "config_of", "staged", "until"]

DISK = {"kind": "disk", "path": "/weights"}


def config_of(**settings: Any) -> Config:
    """The settings of a whole whose task is pushed."""
    return Config.model_validate(
        {
            "tasks": [{"name": "t", "prompts": {"push": True}, "agent": {"name": "a"}, "judger": {"name": "j"}}],
            "pause": {"deadline_s": 2.0},
            "buffer": {"path": "journal.db", "lease_s": 100.0},
            "start_timeout_s": 10.0,
            "request_timeout_s": 5.0,
            **settings,
        }
    )


@asynccontextmanager
async def staged(number: int = 2, *, journal: bool = True, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """Give a coordinator that runs, and its shards."""
    if not journal:
        settings.setdefault("buffer", {"lease_s": 100.0})
    shards = [MemoryShard(f"s{index}", journal=journal) for index in range(number)]
    numbers = count()
    coordinator = Coordinator(config_of(**settings), shards, new_id=lambda: f"b{next(numbers)}")
    for shard in shards:
        shard.start()
    try:
        await coordinator.start()
        await coordinator.ready()
        yield coordinator, *shards
    finally:
        for shard in shards:
            shard.speak()
        await coordinator.stop()
        for shard in shards:
            await shard.close()


async def until(true: Any, within_s: float = 30.0) -> None:
    """Wait, in virtual time, until something is so."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - what it waits for has no event of its own, and the time is virtual
            await asyncio.sleep(0.05)


def check_books(coordinator: Coordinator) -> None:
    """P1: what is admitted is in exactly one account."""
    ledger = coordinator.members.ledger
    for unit in ("groups", "samples"):
        assert ledger[unit]["admitted"] == sum(number for name, number in ledger[unit].items() if name != "admitted")
