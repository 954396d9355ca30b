"""Who uses the service: trainers, an operator who pauses and resumes, an evaluator, whoever feeds prompts.

Invariants:

- An actor belongs to the world: it survives the service, and goes on with the next life.
- What the service raises is one of its own errors; anything else breaks the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.errors import ServiceError
from rollout_svc.gate import LANES, Lane
from tests.simulation.journal import check_record
from tests.simulation.life import Gone
from tests.simulation.pausing import cancelled_after, pause, resume
from tests.simulation.shape import MODES

if TYPE_CHECKING:
    from tests.simulation.history import History

__all__ = ["evaluate", "operate", "train"]

_LANES: Final[tuple[tuple[Lane, ...], ...]] = (LANES, LANES, LANES, ("train",), ("eval",))
_DEADLINES: Final = (0.02, 0.1, 0.5, 1.0, 3.0)
_LATE_S: Final = 3 / 512  # by which an answer may be late: the loop's own grain


# -- the trainer ---------------------------------------------------------------------------------------------


async def train(history: History, number: int) -> None:
    """Take, train, and bring new weights; the second trainer only takes."""
    rng = Random(f"{history.world.seed}:trainer:{number}")
    while not history.over:
        await history.alive.wait()
        try:
            await _round(history, rng, brings_weights=number == 0)
        except (Gone, ServiceError) as error:
            history.world.say(f"trainer{number}", "meets", type(error).__name__, str(error)[:100])
            await asyncio.sleep(rng.uniform(0.05, 0.3))


async def _round(history: History, rng: Random, *, brings_weights: bool) -> None:
    world, life, shape = history.world, history.world.life, history.shape
    step, size = life.parts.fleet.version, shape.config.trainer.train_batch_size
    if brings_weights and world.faults.healed and not life.parts.pool.active:
        await _bring_weights(history, rng, step + 1)  # nobody has the weights: the trainer still does
    groups = size if world.faults.healed is False else max(1, min(size, life.parts.buffer.ready))
    take = life.call("take_batch", lambda: life.service.take_batch(step, groups, rng.uniform(0.5, 3.0)))
    if world.faults.draw(("caller_cancelled",)):
        await _left(history, take, rng)
        return
    batch = await take
    _check_batch(history, batch, step)
    if shape.journalled:
        known = batch["batch_id"] in world.durable.leases
        world.require(known, "P31", f"batch {batch['batch_id']} was answered before its lease was durable")
    await asyncio.sleep(rng.uniform(0.01, 0.2))
    if world.faults.healed or rng.random() < 0.85:
        await life.call("ack", lambda: life.service.ack(batch["batch_id"]))
        known = not shape.journalled or batch["batch_id"] in world.durable.acknowledged
        world.require(known, "P31", f"the ack of {batch['batch_id']} was answered before it was durable")
    if brings_weights and (not world.faults.healed or rng.random() < 0.3):
        await _bring_weights(history, rng, step + 1)


def _check_batch(history: History, batch: dict[str, Any], step: int) -> None:
    trainer = history.shape.config.trainer
    world, bound, masked = history.world, trainer.max_staleness, trainer.max_token_staleness
    oldest = None if masked is None else batch["step"] - masked
    for group in batch["groups"]:
        size = len(group["samples"])
        world.require(size == history.shape.group_size, "P2", f"{group['group_id']} came with {size} samples")
        world.require(group["group_id"] in world.journal, "P31", f"{group['group_id']} is leased, not durable")
        for sample in group["samples"]:
            check_record(world, sample, oldest)
            for span in sample["weight_versions"]:
                fresh = span["version"] is not None and batch["step"] - span["version"] <= bound
                world.require(fresh, "P32", f"{sample['sample_id']} has {span} at step {step}")


async def _bring_weights(history: History, rng: Random, version: int) -> None:
    world, life, shape = history.world, history.world.life, history.shape
    source = {"kind": "disk", "path": f"/weights/v{version}"}
    deadline = min(shape.config.pause.deadline_s, rng.choice(_DEADLINES) + 0.3)
    if rng.random() < 0.3:
        how = {"deadline_s": deadline, "mode": rng.choice(MODES)}
        update = life.call("update", lambda: life.service.update_weights(version, source, pause=how))
        if world.faults.draw(("caller_cancelled",)):
            await _left(history, update, rng)
        else:
            await update
        return
    report = await pause(life, mode=rng.choice(MODES), deadline_s=deadline)
    if report is None:
        return
    try:
        await life.call("update", lambda: life.service.update_weights(version, source))
    finally:
        if life.up:
            await resume(life, report.ticket)


async def _left(history: History, work: Coroutine[Any, Any, Any], rng: Random) -> None:
    """Make a call and leave it at some moment, often when the ladder gets to one."""
    world = history.world
    delay = rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)) * rng.random()
    strike = world.faults.strike("caller_cancelled")
    try:
        await cancelled_after(delay, work, world.life)
    finally:
        strike.end()


# -- the operator --------------------------------------------------------------------------------------------


async def operate(history: History) -> None:
    """Pause and resume, in every order there is."""
    world, rng = history.world, Random(f"{history.world.seed}:operator")
    while not world.faults.healed:
        await history.alive.wait()
        await asyncio.sleep(rng.uniform(0.05, 0.7))
        life = world.life
        try:
            await _operation(history, rng)
        except (Gone, ServiceError) as error:
            world.say("operator", "meets", type(error).__name__, str(error)[:100])
        if not life.up:
            continue
        try:
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.2)) * rng.random())
            await resume(life)
        except Gone:
            continue


async def _operation(history: History, rng: Random) -> None:
    world, life = history.world, history.world.life
    deadline, lanes, mode = rng.choice(_DEADLINES), rng.choice(_LANES), rng.choice(MODES)
    name = world.faults.draw(("overlap", "flap", "old_ticket", "caller_cancelled"))
    if name == "overlap":
        await _overlap(history, rng)
    elif name == "flap":
        await _flap(history, rng)
    elif name == "old_ticket":
        await _old_ticket(history, rng)
    elif name == "caller_cancelled":
        await _left(history, pause(life, mode=mode, deadline_s=deadline, lanes=lanes), rng)
        await _left(history, resume(life), rng)
    else:
        await pause(life, mode=mode, deadline_s=deadline, lanes=lanes)


async def _overlap(history: History, rng: Random) -> None:
    """Several pauses and resumes at once."""
    world, life = history.world, history.world.life
    strike = world.faults.strike("overlap")

    async def one(index: int) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.5)) * rng.random() * index)
        ticket = life.parts.pauses.ticket
        if index == 2:
            await resume(life)
        else:
            await pause(
                life,
                mode=rng.choice(MODES),
                deadline_s=rng.choice(_DEADLINES),
                lanes=rng.choice(_LANES),
                if_ticket=rng.choice((None, ticket)),
            )

    tasks = [world.spawn(one(index)) for index in range(3)]
    await asyncio.wait(tasks)
    strike.end()
    _raise_first(tasks)


def _raise_first(tasks: list[asyncio.Task[Any]]) -> None:
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


async def _flap(history: History, rng: Random) -> None:
    world, life = history.world, history.world.life
    strike = world.faults.strike("flap")
    try:
        for _ in range(rng.randint(3, 8)):
            deadline = rng.choice((0.005, 0.02, 0.1))
            await pause(life, mode=rng.choice(MODES), deadline_s=deadline, lanes=rng.choice(_LANES))
            await resume(life)
    finally:
        strike.end()


async def _old_ticket(history: History, rng: Random) -> None:
    """`pause; resume; late pause and late resume with the old ticket`: it stays as it is."""
    world, life = history.world, history.world.life
    strike = world.faults.strike("old_ticket")
    try:
        pauses = life.parts.pauses
        old = pauses.ticket
        first = world.spawn(pause(life, mode=rng.choice(MODES), deadline_s=rng.choice(_DEADLINES)))
        try:
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.3)) * rng.random())
            await pause(life, mode=rng.choice(MODES), deadline_s=0.1, if_ticket=old - 1)
            await resume(life, old - 1)
        finally:
            await asyncio.wait({first})
            _raise_first([first])
        await resume(life)
        if pauses.state == "running" and life.up:
            late = await pause(life, mode=rng.choice(MODES), deadline_s=0.1, if_ticket=old - 1)
            world.require(late is None, "P11", f"a pause with the old if_ticket {old - 1} was taken")
    finally:
        strike.end()


# -- the evaluator -------------------------------------------------------------------------------------------


async def evaluate(history: History) -> None:
    """Have a few prompts evaluated, again and again."""
    world, rng = history.world, Random(f"{history.world.seed}:evaluator")
    while not world.faults.healed:
        await history.alive.wait()
        await asyncio.sleep(rng.uniform(0.05, 0.4))
        try:
            await _evaluation(history, rng)
        except (Gone, ServiceError) as error:
            world.say("evaluator", "meets", type(error).__name__, str(error)[:100])


async def _evaluation(history: History, rng: Random) -> None:
    """Ask for one, of the fleet's weights or of others; a few callers leave."""
    world, life = history.world, history.world.life
    lines = [{"id": f"eval{n}", "input_ids": [800 + rng.randrange(90), 7]} for n in range(rng.randint(1, 5))]
    version, timeout_s = rng.choice((None, None, 0, 1)), rng.choice((0.1, 1.0, 3.0, 8.0))
    wanted = None if version is None else life.parts.fleet.version + version
    how = {"sampling": {"max_tokens": life.max_tokens}, "version": wanted, "timeout_s": timeout_s}
    task = rng.choice(history.shape.tasks)

    async def work() -> dict[str, Any]:
        began = world.now
        try:
            answer = await life.service.evaluate(task, lines, **how)
        finally:
            took = world.now - began
            world.require(took <= timeout_s + _LATE_S, "P8", f"an evaluation of {timeout_s:g} s took {took:.4f} s")
        _check_evaluation(history, answer, lines, wanted)
        return answer

    call = life.call("evaluate", work)
    if world.faults.draw(("caller_cancelled",)):
        await _left(history, call, rng)
    else:
        await call


def _check_evaluation(history: History, answer: dict[str, Any], lines: list[Any], wanted: int | None) -> None:
    """Every prompt has its answer, of one version, and training has nothing of it."""
    world, found = history.world, set()
    ids = [group["prompt"]["id"] for group in answer["groups"]]
    world.require(ids == [line["id"] for line in lines], "P1", f"{ids} are answered, {lines} were asked for")
    for group in answer["groups"]:
        world.require(group["group_id"] not in world.journal, "P28", f"{group['group_id']} is in the journal")
        [sample] = group["samples"]
        if sample["status"] == "FAILED":
            nothing = sample["reward"] is None and not sample["response_ids"]
            world.require(nothing, "P2", f"{sample['sample_id']} failed, it has {sample}")
            continue
        check_record(world, sample)
        found |= {span["version"] for span in sample["weight_versions"]}
    one = len(found) <= 1 and None not in found and (wanted is None or found <= {wanted})
    world.require(one, "P7", f"an evaluation of version {wanted} came with tokens of {found}")
