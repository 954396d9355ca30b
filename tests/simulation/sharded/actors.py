"""Who uses a sharded service: a trainer, an operator who pauses and resumes, an evaluator, whoever feeds prompts.

Invariant: an actor belongs to the world: it survives the coordinator, and goes on with the next one.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.errors import Conflict, NotFound, NotNow, ServiceError
from rollout_svc.gate import LANES, Lane
from tests.simulation.calls import Gone
from tests.simulation.shape import MODES
from tests.simulation.sharded import calls
from tests.simulation.sharded.front import Front

if TYPE_CHECKING:
    from tests.simulation.sharded.history import ShardedHistory

__all__ = ["evaluate", "feed", "operate", "train"]

_LANES: Final[tuple[tuple[Lane, ...], ...]] = (LANES, LANES, LANES, ("train",), ("eval",))
_DEADLINES: Final = (0.05, 0.3, 1.0, 3.0)
_TRUSTS: Final = 0.6  # share of the acks that are not asked for again once they were accepted
_PUSHES: Final = 4  # in how many parts the prompts of a task come


async def feed(history: ShardedHistory) -> None:
    """Push every prompt, again until it was taken; what is known is not added twice."""
    world, rng = history.world, Random(f"{history.world.seed}:feeder")
    for part in range(_PUSHES):
        for task in history.shape.tasks:
            count = -(-history.shape.prompts // _PUSHES // len(history.shape.tasks))
            lines = [{"id": f"{task}.{part}.{n}", "input_ids": [10 + n, 3, part]} for n in range(count)]
            while not await _pushed(history, task, lines):  # noqa: ASYNC110 - it asks again, in virtual time
                await asyncio.sleep(rng.uniform(0.1, 0.4))
        if not world.faults.healed:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
    history.fed = True


async def _pushed(history: ShardedHistory, task: str, lines: list[Any]) -> bool:
    front = await history.front_up()
    try:
        accepted = await front.call("put_prompts", lambda: front.coordinator.put_prompts(task, lines))
    except (Gone, ServiceError) as error:
        history.world.say("feeder", "meets", type(error).__name__, str(error)[:100])
        return False
    durable = {key for host in history.hosts for key in host.world.durable.pushed}
    missing = [line["id"] for line in lines if (task, line["id"]) not in durable]
    history.world.require(not missing, "P31", f"{accepted} was answered, {missing} are not durable")
    return True


# -- the trainer ---------------------------------------------------------------------------------------------


async def train(history: ShardedHistory) -> None:
    """Take, train, acknowledge, and bring new weights."""
    rng = Random(f"{history.world.seed}:trainer")
    while not history.over:
        front = await history.front_up()
        try:
            await _round(history, front, rng)
        except (Gone, ServiceError) as error:
            history.world.say("trainer", "meets", type(error).__name__, str(error)[:160])
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            if history.world.faults.healed and isinstance(error, NotNow) and rng.random() < 0.5:
                await _try_weights(history, rng)


async def _round(history: ShardedHistory, front: Front, rng: Random) -> None:
    world, faults = history.world, history.world.faults
    step, size, asked_at = front.coordinator.weights.version, history.shape.config.trainer.train_batch_size, world.now
    groups = size
    if faults.healed:
        groups = max(1, min(size, sum(host.life.parts.buffer.ready for host in history.hosts if host.alive)))
    taking = calls.take(front, step, groups, rng.uniform(0.5, 4.0))
    if history.leaves_now():
        await calls.left(front, taking, rng)
        return
    batch = await taking
    history.handed.arrived(batch, asked_at)
    await asyncio.sleep(rng.uniform(0.01, 0.2))
    if faults.draw(("no_ack",)):
        faults.once("no_ack")
        await asyncio.sleep(rng.choice((0.0, 1.0, 4.0)) * rng.random())
    else:
        await _acknowledge(history, batch["batch_id"], rng)
    if rng.random() < (0.3 if faults.healed else 0.7):
        await _bring_weights(history, front, rng)


async def _acknowledge(history: ShardedHistory, batch_id: str, rng: Random) -> None:
    """Acknowledge it, again until that is answered one way or the other."""
    while True:
        front = await history.front_up()
        try:
            await calls.ack(front, batch_id)
        except (Conflict, NotFound) as error:
            ended = history.handed.batches[batch_id].ends
            told = f"batch {batch_id} cannot be acknowledged, its lease lasts until {ended:.3f}: {error}"
            history.world.require(history.world.now >= ended, "P31", told)
            return
        except (Gone, NotNow) as error:
            history.world.say("trainer", "asks again", batch_id, type(error).__name__, str(error)[:160])
            detail = error.detail if isinstance(error, NotNow) else None
            if isinstance(detail, dict) and detail.get("batch_id") == batch_id:
                history.handed.accepted(batch_id)
                _owes(history, front)
                if rng.random() < _TRUSTS:
                    return
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            continue
        history.handed.acknowledged(batch_id)
        return


def _owes(history: ShardedHistory, front: Front) -> None:
    """The coordinator has promised what only its book has: now and then it does not live to see it done."""
    if history.world.faults.draw(("coordinator_owing",)):
        history.world.faults.once("coordinator_owing")
        front.kill("coordinator_owing")


async def _try_weights(history: ShardedHistory, rng: Random) -> None:
    try:
        await _bring_weights(history, await history.front_up(), rng)
    except (Gone, ServiceError) as error:
        history.world.say("trainer", "meets", type(error).__name__, str(error)[:160])


async def _bring_weights(history: ShardedHistory, front: Front, rng: Random) -> None:
    version = front.coordinator.weights.version + 1
    deadline = min(history.shape.config.pause.deadline_s, rng.choice(_DEADLINES) + 0.3)
    if rng.random() < 0.4:
        work = calls.update(front, version, {"deadline_s": deadline, "mode": rng.choice(MODES)})
        if history.leaves_now():
            await calls.left(front, work, rng)
        else:
            await work
        return
    report = await calls.pause(front, mode=rng.choice(MODES), deadline_s=deadline)
    if report is None:
        return
    try:
        await calls.update(front, version, None)
    finally:
        if front.up:
            await calls.resume(front, report.ticket)


# -- the operator --------------------------------------------------------------------------------------------


async def operate(history: ShardedHistory) -> None:
    """Pause and resume, in every order there is."""
    world, rng = history.world, Random(f"{history.world.seed}:operator")
    while not world.faults.healed:
        front = await history.front_up()
        await asyncio.sleep(rng.uniform(0.1, 1.2))
        try:
            await _operation(history, front, rng)
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.3)) * rng.random())
            await calls.resume(front)
        except (Gone, ServiceError) as error:
            world.say("operator", "meets", type(error).__name__, str(error)[:160])


async def _operation(history: ShardedHistory, front: Front, rng: Random) -> None:
    world = history.world
    how: dict[str, Any] = {
        "deadline_s": rng.choice(_DEADLINES),
        "lanes": rng.choice(_LANES),
        "mode": rng.choice(MODES),
    }
    kind = rng.choice(("plain", "plain", "overlap", "flap", "old_ticket"))
    if history.leaves_now():
        await calls.left(front, calls.pause(front, **how), rng)
        await calls.left(front, calls.resume(front), rng)
    elif kind == "overlap":
        await _overlap(history, front, rng)
    elif kind == "flap":
        for _ in range(rng.randint(2, 5)):
            await calls.pause(front, **how | {"deadline_s": rng.choice((0.02, 0.1))})
            await calls.resume(front)
    elif kind == "old_ticket":
        old = front.coordinator.pauses.ticket
        if await calls.pause(front, **how) is not None and await calls.resume(front):
            late = await calls.pause(front, mode="abort", deadline_s=0.1, if_ticket=old - 1)
            world.require(late is None, "P11", f"a pause with the old if_ticket {old - 1} was taken")
    else:
        await calls.pause(front, **how)


async def _overlap(history: ShardedHistory, front: Front, rng: Random) -> None:
    """Several pauses and a resume at once."""

    async def one(index: int) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.5)) * rng.random() * index)
        if index == 2:
            await calls.resume(front)
        else:
            how: dict[str, Any] = {"mode": rng.choice(MODES), "deadline_s": rng.choice(_DEADLINES)}
            await calls.pause(front, **how, lanes=rng.choice(_LANES))

    tasks = [history.world.spawn(one(index)) for index in range(3)]
    await asyncio.wait(tasks)
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


# -- the evaluator -------------------------------------------------------------------------------------------


async def evaluate(history: ShardedHistory) -> None:
    """Have a few prompts evaluated, again and again; each has its answer, in order."""
    world, rng = history.world, Random(f"{history.world.seed}:evaluator")
    while not world.faults.healed:
        front = await history.front_up()
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        lines = [{"id": f"eval{n}", "input_ids": [800 + rng.randrange(90), 7]} for n in range(rng.randint(1, 5))]
        task, timeout_s = rng.choice(history.shape.tasks), rng.choice((0.1, 1.0, 3.0))
        how: dict[str, Any] = {"sampling": {"max_tokens": 24}, "timeout_s": timeout_s}
        try:
            answer = await calls.bounded(
                front,
                "evaluate",
                timeout_s + 6.0,
                lambda: front.coordinator.evaluate(task, lines, **how),  # noqa: B023
            )
        except (Gone, ServiceError) as error:
            world.say("evaluator", "meets", type(error).__name__, str(error)[:160])
            continue
        ids = [group["prompt"]["id"] for group in answer["groups"]]
        world.require(ids == [line["id"] for line in lines], "P1", f"{ids} are answered, {lines} were asked for")
