"""Samples under way, written down beside everything else the loop has to do."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from rollout_svc.rollout.partials import Partials


async def test_samples_that_take_long_to_read_do_not_hold_the_loop() -> None:
    """However few were looked at: what has taken milliseconds is followed by a turn of everybody else."""
    now = 0.0
    noted: list[int] = []

    def kept(sample: Any) -> None:
        nonlocal now
        now += 0.003
        noted.append(sample.number)

    samples = [SimpleNamespace(number=n, attempt=1, account="in_flight", status=None) for n in range(8)]
    members = [SimpleNamespace(sample=sample, attempt=1) for sample in samples]
    rollouts: Any = SimpleNamespace(members=lambda _: members)
    pool: Any = SimpleNamespace(workers={})
    storage: Any = SimpleNamespace(kept=kept)
    partials = Partials(rollouts=rollouts, pool=pool, storage=storage, interval_s=1.0, clock=lambda: now)
    sweep = asyncio.get_running_loop().create_task(partials.sweep())
    seen = [0]
    while not sweep.done():
        await asyncio.sleep(0)
        seen.append(len(noted))
    await sweep
    assert noted == list(range(8))
    assert max(after - before for before, after in pairwise(seen)) <= 2
