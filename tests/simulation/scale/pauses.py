"""Pauses that are not simple: what each of them costs for each of the things it has to end.

Invariant: every pause is over by its deadline and accounts for everything it met.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import orjson

from rollout_svc.pause.report import PauseReport
from tests.simulation.scale.measure import Figures, Meter, metered
from tests.simulation.scale.stage import MeteredLoop, Stage

__all__ = ["KINDS", "measure_pause"]

_DEADLINE_S: Final = 30.0

_ENDED: Final[Mapping[str, Callable[[PauseReport, int], bool]]] = {
    "lost aborts": lambda report, number: len(report.abandoned) == number,
    "hung judges": lambda report, _: report.clean,
    "busy loops": lambda report, _: report.clean,
    "parked loops": lambda report, number: report.clean and len(report.parked) == number,
}
KINDS: Final = tuple(_ENDED)
"""Aborts that the engines lose, judges that hang, loops in code of their own, loops that are parked."""

_AGENTS: Final = {"busy loops": "Busy", "parked loops": "Parked"}
_JUDGERS: Final = {"hung judges": "HungJudger"}


async def _measure(kind: str, stage: Stage, loop: MeteredLoop) -> Figures:
    figures: Figures = {}
    meter, number = Meter(loop, figures), stage.in_flight
    await stage.start()
    parts = stage.service.parts
    await stage.until(lambda: parts.rollouts.generating >= number, "not begun")
    if kind == "lost aborts":
        await stage.fill()
        stage.fleet.deaf = True
    elif kind == "hung judges":
        await stage.fill()
        stage.fleet.finish(number)
        await stage.until(lambda: len(parts.judging.calls) >= number, "not judging")
    await asyncio.sleep(1.0)
    with meter.of("pause", number):
        report = await stage.service.pause(deadline_s=_DEADLINE_S)
    if report.elapsed_s > _DEADLINE_S + 0.1 or not _ENDED[kind](report, number):
        raise AssertionError(f"{kind}: {report.rungs} {len(report.abandoned)} abandoned, {len(report.parked)} parked")
    parts.ledger.check()
    with meter.of("report", 1):
        figures["report_bytes"] = len(orjson.dumps(report.as_json()))
    with meter.of("status", 1):
        stage.service.status()
    stage.fleet.heal()
    await stage.service.stop()
    return figures


def measure_pause(kind: str, engines: int, number: int) -> Figures:
    """One pause in virtual time that meets so many of a kind."""

    async def case(loop: MeteredLoop) -> Figures:
        return await _measure(kind, Stage(engines, number, agent=_AGENTS.get(kind), judger=_JUDGERS.get(kind)), loop)

    return metered(case)
