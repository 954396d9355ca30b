"""A pause and a resume as a caller makes them, and what it holds the answer to.

Invariants checked here: P8 P9 P11 and the report's own equations.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.errors import Conflict, NotNow, ServiceError
from rollout_svc.gate import LANES, Lane
from rollout_svc.pause.report import PauseReport
from rollout_svc.workers.worker import Worker, WorkerState

if TYPE_CHECKING:
    from tests.simulation.life import Life

__all__ = ["check_report", "pause", "resume"]

_EPSILON_S: Final = 3 / 512  # the loop's own grain
_UNCOUNTED: Final = frozenset({WorkerState.STARTING, WorkerState.DEAD})


async def pause(
    life: Life, *, mode: str, deadline_s: float, lanes: tuple[Lane, ...] = LANES, if_ticket: int | None = None
) -> PauseReport | None:
    """Pause, mode `keep` in all lanes; None when the service refuses for a reason it may have."""
    world = life.world
    kv = world.rng.choice(("keep", "drop"))
    if mode == "keep":
        lanes = LANES

    async def work() -> PauseReport:
        began = world.now
        pauses = life.parts.pauses
        before, running, joinable = pauses.ticket, pauses.state == "running", pauses.joinable
        try:
            report = await life.service.pause(mode=mode, deadline_s=deadline_s, lanes=lanes, if_ticket=if_ticket, kv=kv)
        except Conflict as error:
            if error.type == "frozen":
                world.require((mode, kv) == ("keep", "drop"), "P9", f"a pause in mode {mode} with kv {kv} was refused")
                raise
            allowed = {before} | ({joinable} if joinable is not None else set())
            world.require(if_ticket not in (None, *allowed), "P11", f"if_ticket {if_ticket} was refused at {before}")
            world.require(world.now == began, "P11", "a refusal took time")
            world.require(not running or pauses.ticket == before, "P11", f"a refused pause made ticket {pauses.ticket}")
            raise
        took = world.now - began
        world.require(took <= deadline_s + _EPSILON_S, "P8", f"a pause of {deadline_s:g} s took {took:.4f} s")
        known = {None, before} | ({joinable} if joinable is not None else set())
        world.require(if_ticket in known, "P11", f"a pause with if_ticket {if_ticket} was taken at {before}")
        return report

    try:
        report: PauseReport = await life.call("pause", work)
    except (Conflict, NotNow) as error:
        world.say("caller", "pause refused", error)
        return None
    return report


def check_report(life: Life, report: PauseReport, closed: frozenset[Lane]) -> None:
    """Compare a report with what engines really run; called in the step the climb ended."""
    world, require, keeps = life.world, life.world.require, report.mode == "keep"
    for lane in closed:
        require(not life.parts.gate.is_open(lane), "P9", f"lane {lane} is open after its report")
    for worker_id, tally in report.workers.items():
        ended = tally.answered + tally.cancelled
        worker = life.parts.pool.workers.get(worker_id)
        if keeps and worker is not None and worker.frozen:
            _check_frozen(life, worker)
            ended += len(worker.calls)
        elif worker is not None:
            ended += sum(call.cancelled_for is not None and call.lane in closed for call in worker.calls.values())
        require(tally.in_flight == ended, "P9", f"{worker_id}: {tally.in_flight} in flight, {ended} ended: {tally}")
        if worker is None or worker.state in _UNCOUNTED:
            continue
        engine = world.engines[worker.endpoint.url]
        named = sum(a.worker == worker_id for a in report.abandoned)
        require(named == tally.abandoned, "P9", f"{worker_id}: {tally.abandoned} abandoned, {named} named")
        runs = engine.count(closed | {"canary"}) - (len(worker.calls) if keeps else 0)
        if life.witness.crowded.get(engine.name):
            continue  # its count says nothing certain while another lane's requests come and go there
        unable = tally.residual is None and (not engine.up or engine.frozen)
        if runs > 0 and not named and tally.residual == 0:
            world.breaks("P9", f"{worker_id} is said to be idle, it runs {list(engine.running.values())}")
        elif runs > 0 and not named and tally.residual is not None:
            world.breaks("P9", f"{worker_id} runs {runs}, residual {tally.residual}, nothing is named")
        elif runs > 0 and not named and not unable:
            life.unsaid += 1  # `residual: null` although the engine could have been asked: said, not hidden
        if named:
            require(worker.state is not WorkerState.ACTIVE, "P9", f"{worker} was left with {named} and has traffic")
    require(report.clean == (not report.abandoned), "P9", f"clean is {report.clean}: {report.abandoned}")
    workers = [w for w in life.parts.pool.workers.values() if not (keeps and w.frozen)]
    calls = [c for w in workers for c in w.calls.values() if c.lane in closed and c.cancelled_for is None]
    require(not calls, "P9", f"calls are under way after the report: {calls}")
    if keeps:
        return
    judges = [c.sample_ids for c in life.parts.judging.calls if c.lane in closed]
    require(not judges, "P9", f"judges are under way after the report: {judges}")
    puts = [r for r in life.parts.rollouts._runs.values() if r.putting is not None and r.group.lane in closed]
    saving = [group for group in life.saving.values() if group.account == "in_flight" and group.lane in closed]
    require(not puts and not saving, "P9", f"puts are under way after the report: {puts or saving}")
    parked = sorted(m.sample.sample_id for m in life.parts.rollouts.members(closed) if m.parked)
    require(sorted(report.parked) == parked, "P9", f"parked are {parked}, reported {report.parked}")
    ledgers = {"train": life.parts.ledger, "eval": life.parts.evaluations.ledger}
    in_flight = sum(ledgers[lane].samples("in_flight") for lane in closed)
    require(
        in_flight == len(parked), "P10", f"{in_flight} samples are in flight after the report, {len(parked)} parked"
    )


def _check_frozen(life: Life, worker: Worker) -> None:
    """A worker that counts as frozen makes no token, unless its process went away under it."""
    engine = life.world.engines[worker.endpoint.url]
    gone = worker.state is not WorkerState.ACTIVE or not engine.up or engine.boots != life.boots.get(engine.name)
    life.world.require(gone or not engine.ticking or not engine.running, "P9", f"{worker} is frozen, {engine} is not")


async def resume(life: Life, ticket: int | None = None) -> bool:
    """Resume; whether the service did."""
    world = life.world

    async def work() -> Any:
        pauses = life.parts.pauses
        try:
            record = await life.service.resume(ticket=ticket)
        except Conflict:
            world.require(ticket is not None, "P11", "a resume without a ticket was refused")
            raise
        world.require(not pauses.climbing, "P11", "a resume answered while a pause is under way")
        return record

    try:
        await life.call("resume", work)
    except ServiceError as error:
        world.say("caller", "resume refused", error)
        return False
    return True


async def cancelled_after(seconds: float, work: Any, life: Life) -> None:
    """Make a call and leave it after a while."""
    task = life.world.spawn(work)
    timer = life.world.later(seconds, task.cancel)
    await asyncio.wait({task})
    timer.cancel()
    if not task.cancelled():
        task.result()
