"""The end of a service: what it runs is drained, then every part is closed, in order.

Invariants:

- Every step has a bound; what does not end in its time is named and left behind.
- Nothing new starts: what engines, evaluations and takers wait for is ended first.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rollout_svc.assembly import Parts
from rollout_svc.errors import NotNow
from rollout_svc.tasks import wait_until

__all__ = ["STOP_MARGIN_S", "shut_down"]

STOP_MARGIN_S: Final = 5.0
"""Seconds for what is left to end after the last pause, once for tasks and once for processes."""


async def shut_down(parts: Parts, deadline_s: float) -> tuple[str, ...]:
    """Drain within `deadline_s`, then end every task, socket and process; returns the tasks that did not end."""
    parts.batches.wake()
    parts.evaluations.fail(lambda: NotNow("stopping", "the service is stopping"))
    parts.launching.hold()
    await parts.pauses.pause(mode="abort", deadline_s=deadline_s)
    await parts.offloading.wake_for_others(deadline_s)
    for part in (parts.batches, parts.pool, parts.producer, parts.evaluations, parts.attendance):
        part.close()
    survivors = await parts.tasks.close(end := asyncio.get_running_loop().time() + STOP_MARGIN_S)
    await parts.transport.close()
    last = (parts.processes, parts.tool_processes, parts.judging, parts.storage, parts.trajectories, parts.experts)
    closing = [asyncio.ensure_future(part.close()) for part in last]
    closing.append(asyncio.ensure_future(parts.launching.close(end + STOP_MARGIN_S / 2)))
    await wait_until(closing, end + STOP_MARGIN_S)
    parts.rollouts.let_go("the service has stopped")
    return survivors
