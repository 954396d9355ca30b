"""The calls of users to a coordinator, and what their answers are held to.

Invariants checked here: P8 (a pause returns by its deadline), P11 (tickets), P22 (nobody waits beyond a bound).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from rollout_svc.errors import Conflict, NotNow, ServiceError
from rollout_svc.gate import LANES, Lane
from rollout_svc.pause.report import PauseReport
from tests.simulation.sharded.front import Front

__all__ = ["ack", "bounded", "left", "pause", "resume", "take", "update"]

_EPSILON_S: Final = 3 / 512  # the loop's own grain
_READ_S: Final = 30.0  # for which the records of a batch, or a shard's answer, are waited for at most
_LEND_S: Final = 5.0  # beyond its time, for which a take may lease what is there


async def bounded(front: Front, name: str, within_s: float, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Make a call that has to answer in time, whatever it answers."""
    world = front.world

    async def work() -> Any:
        began = world.now
        try:
            return await make()
        finally:
            took = world.now - began
            world.require(took <= within_s + _EPSILON_S, "P22", f"{name} took {took:.3f} s, of {within_s:g}")

    return await front.call(name, work)


async def take(front: Front, step: int, groups: int, timeout_s: float) -> dict[str, Any]:
    """Take a batch."""
    bound = timeout_s + _LEND_S + _READ_S
    batch: dict[str, Any] = await bounded(
        front, "take_batch", bound, lambda: front.coordinator.take_batch(step, groups, timeout_s)
    )
    return batch


async def ack(front: Front, batch_id: str) -> None:
    """Acknowledge a batch."""
    await bounded(front, "ack", _READ_S, lambda: front.coordinator.ack(batch_id))


async def pause(
    front: Front, *, mode: str, deadline_s: float, lanes: tuple[Lane, ...] = LANES, if_ticket: int | None = None
) -> PauseReport | None:
    """Pause, mode `keep` in all lanes; None when it is refused for a reason there may be."""
    world = front.world
    if mode == "keep":
        lanes = LANES

    async def work() -> PauseReport:
        pauses = front.coordinator.pauses
        began, before, allowed = world.now, pauses.ticket, {None, pauses.ticket, pauses.joinable}
        try:
            report = await front.coordinator.pause(mode=mode, deadline_s=deadline_s, lanes=lanes, if_ticket=if_ticket)
        except Conflict as error:
            if error.type == "stale_ticket":
                world.require(if_ticket not in allowed, "P11", f"if_ticket {if_ticket} was refused at {before}")
                world.require(world.now == began, "P11", "a refusal took time")
            raise
        took = world.now - began
        world.require(took <= deadline_s + _EPSILON_S, "P8", f"a pause of {deadline_s:g} s took {took:.4f} s")
        world.require(if_ticket in allowed, "P11", f"a pause with if_ticket {if_ticket} was taken at {before}")
        return report

    try:
        report: PauseReport = await front.call("pause", work)
    except (Conflict, NotNow) as error:
        world.say("caller", "pause refused", error)
        return None
    return report


async def resume(front: Front, ticket: int | None = None) -> bool:
    """Resume; whether it did."""
    world, coordinator = front.world, front.coordinator

    async def work() -> Any:
        try:
            record = await coordinator.resume(ticket=ticket)
        except Conflict:
            world.require(ticket is not None, "P11", "a resume without a ticket was refused")
            raise
        return record

    try:
        await bounded(front, "resume", 4 * _READ_S, work)
    except ServiceError as error:
        world.say("caller", "resume refused", error)
        return False
    return True


async def update(front: Front, version: int, how: dict[str, Any] | None) -> dict[str, Any]:
    """Bring weights."""
    source = {"kind": "disk", "path": f"/weights/v{version}"}
    bound = front.coordinator.weights._bound_s * 2 + 60.0
    record: dict[str, Any] = await bounded(
        front, "update", bound, lambda: front.coordinator.update_weights(version, source, how)
    )
    return record


async def left(front: Front, work: Coroutine[Any, Any, Any], rng: Random) -> None:
    """Make a call, and leave it after a while."""
    world = front.world
    task = world.spawn(work)
    timer = world.later(rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)) * rng.random(), task.cancel)
    await asyncio.wait({task})
    timer.cancel()
    if not task.cancelled():
        task.result()
