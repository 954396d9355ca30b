"""An actor whose service could not be made, and a shard that fails with what is nobody's error."""

from __future__ import annotations

import asyncio
import traceback
from concurrent.futures import Future
from typing import Any

import pytest

from rollout_svc.config import Config
from rollout_svc.ray.actor import ServiceActor
from rollout_svc.ray.shard import RayShard
from rollout_svc.sharding.protocol import ShardLost

UNUSABLE: Any = "no settings at all"


def test_a_service_that_was_not_made_says_so_for_ever() -> None:
    """However often it is asked, it says the same, and nothing of who asked before is kept."""
    actor = ServiceActor(UNUSABLE)
    told = []
    for _ in range(3):
        with pytest.raises(AttributeError) as failed:
            asyncio.run(actor.made())
        told.append(len(traceback.extract_tb(failed.value.__traceback__)))
    assert told[0] == told[1] == told[2]


class FailingActor:
    """A shard's actor that fails at every call, as Ray tells of it."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    @property
    def call(self) -> FailingActor:
        """The method."""
        return self

    def remote(self, *_: Any) -> FailingActor:
        """Call it."""
        return self

    def future(self) -> Future[Any]:
        """What it comes to."""
        from ray.exceptions import RayTaskError

        failed: Future[Any] = Future()
        kind: Any = RayTaskError
        failed.set_exception(kind("call", "a traceback", self._cause).as_instanceof_cause())
        return failed


@pytest.mark.parametrize("cause", [OSError("no such device"), TimeoutError("the journal is slow")])
async def test_a_shard_that_fails_with_anything_is_lost(cause: Exception) -> None:
    """P23: it is out of step, by name, with what it said; whoever looks after the shards goes on."""
    config = Config.model_validate({"tasks": [{"name": "t", "prompts": {"push": True}}]})
    with pytest.raises(ShardLost, match=f"shard s0: {type(cause).__name__}: {cause}"):
        await RayShard("s0", FailingActor(cause), config).call("status", {})
