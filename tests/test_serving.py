"""A service as a process: what is looked at for the log ends nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from rollout_svc.errors import NotNow
from rollout_svc.serve import EXIT_OK, _run


class Shards:
    """One service of several, all of which are lost as soon as they were there."""

    failure = None

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    async def ready(self) -> None:
        """All of them are there."""

    async def concurrency(self) -> dict[str, Any]:
        """Nobody can say; and then somebody ends it."""
        self._stop.set()
        raise NotNow("starting", "no shard answers")


async def test_a_plan_that_nobody_can_tell_ends_no_service() -> None:
    """P12: shards that are lost just after a start return; the line that would have told their plan does not end it."""
    stop = asyncio.Event()
    shards: Any = Shards(stop)
    before = gc.get_threshold()
    try:
        assert await _run(shards, "http://here", stop, asyncio.Event()) == EXIT_OK
    finally:  # what a service does with its own process
        gc.set_threshold(*before)
        gc.unfreeze()
