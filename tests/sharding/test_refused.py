"""A shard that cannot be made: its journal is another's, or its settings do not work there."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import ConfigError
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import config_of
from tests.support.memory_shards import MemoryShard
from tests.support.virtual import virtual


@virtual
async def test_a_shard_that_cannot_be_ends_the_start_at_once() -> None:
    """P35: what a shard finds wrong, such as a journal of another number of shards, is not waited out."""
    shards = [MemoryShard("s0"), MemoryShard("s1")]
    shards[1].refuses["status"] = ConfigError.at("buffer.path", "journal.db.s1 is another's")
    coordinator = Coordinator(config_of(start_timeout_s=600.0), shards)
    began = asyncio.get_running_loop().time()
    await coordinator.start()
    with pytest.raises(ConfigError, match=r"buffer\.path: journal\.db\.s1 is another's"):
        await coordinator.ready()
    assert asyncio.get_running_loop().time() - began < 5.0
    await coordinator.stop()
