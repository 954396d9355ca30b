"""One case: so many engines, so many requests in flight, and what each thing then costs.

Invariants:

- Seconds are processor time of the one thread there is; the stand-in engines are in it, some microseconds a call.
- Everything that is measured has to come out right: a pause that is not clean, or misses an answer, ends the run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson

from rollout_svc.config import Routing
from rollout_svc.hosting import COLLECTOR
from rollout_svc.observe.metrics import Metrics
from rollout_svc.status import rss_bytes
from tests.simulation.scale.stage import GROUP_SIZE, MeteredLoop, Stage

__all__ = ["Figures", "Meter", "measure", "metered"]

Figures = dict[str, float]
_QUIET_S: Final = 20.0  # virtual seconds of doing nothing but looking after engines
_TURN_OVER: Final = 0.25  # of what is in flight is answered and replaced where that is measured


class Meter:
    """Processor seconds and the longest turn of a part of a run."""

    def __init__(self, loop: MeteredLoop, figures: Figures) -> None:
        self._loop = loop
        self._figures = figures

    @contextmanager
    def of(self, name: str, count: int = 1) -> Iterator[None]:
        """Measure what is done within; `count`: among how many it is shared."""
        self._loop.longest_s, began = 0.0, time.thread_time()
        yield
        spent = time.thread_time() - began
        self._figures[f"{name}_us"] = 1e6 * spent / count
        self._figures[f"{name}_turn_ms"] = 1e3 * max(self._loop.longest_s, 0.0)


async def _measure(stage: Stage, loop: MeteredLoop) -> Figures:
    figures: Figures = {}
    meter, service, engines, in_flight = Meter(loop, figures), stage.service, stage.engines, stage.in_flight
    with meter.of("start", engines):
        await stage.start()
    rss = rss_bytes()
    with meter.of("dispatch", in_flight):
        await stage.fill()
    figures["rss_kb"] = (rss_bytes() - rss) / in_flight / 1024
    figures |= {f"{what}_per_engine": number / engines for what, number in stage.census().items()}
    began = time.thread_time()
    gc.collect()
    figures["collection_ms"] = 1e3 * (time.thread_time() - began)
    await asyncio.sleep(0)  # a turn ends here: the next ones are measured without it
    with meter.of("quiet", round(engines * _QUIET_S)):
        await asyncio.sleep(_QUIET_S)
    sample = max(GROUP_SIZE, int(in_flight * _TURN_OVER) // GROUP_SIZE * GROUP_SIZE)
    with meter.of("sample", sample):
        await stage.turn_over(sample)
    _look(stage, figures)
    await asyncio.sleep(0)
    with meter.of("batch", sample):
        batch = await service.lease_batch(0, sample // GROUP_SIZE, 10.0)
    with meter.of("ack", sample):
        await service.ack(batch.batch_id)
    await stage.fill()
    await _stop_and_go(stage, meter, figures)
    with meter.of("stop", in_flight):
        await service.stop()
    return figures


def _look(stage: Stage, figures: Figures) -> None:
    """What is asked of it while it runs."""
    service = stage.service
    metrics = Metrics(service.bus, service.status)
    metrics.render()
    looks: dict[str, Any] = {
        "status": lambda: orjson.dumps(service.status()),
        "stuck": lambda: orjson.dumps(service.stuck(0.0)),
        "metrics": lambda: metrics.render()[0],
    }
    for name, look in looks.items():
        began = time.thread_time()
        body = look()
        figures[f"{name}_ms"] = 1e3 * (time.thread_time() - began)
        figures[f"{name}_bytes"] = len(body)


async def _stop_and_go(stage: Stage, meter: Meter, figures: Figures) -> None:
    """A pause of everything, and the resume that sends all of it again."""
    service, fleet = stage.service, stage.fleet
    running = fleet.count
    calls, carried = sum(fleet.control_calls.values()), fleet.control_bytes
    with meter.of("pause", running):
        report = await service.pause(deadline_s=30.0)
    answered = sum(tally.answered for tally in report.workers.values())
    if not report.clean or answered != running or fleet.count:
        raise AssertionError(f"{answered} of {running} answered: {report}")
    figures["pause_calls_per_engine"] = (sum(fleet.control_calls.values()) - calls) / stage.engines
    figures["pause_sent_bytes"] = fleet.control_bytes - carried
    began = time.thread_time()
    figures["report_bytes"] = len(orjson.dumps(report.as_json()))
    figures["report_ms"] = 1e3 * (time.thread_time() - began)
    stage.service.parts.ledger.check()
    with meter.of("again", running):
        await service.resume()
        await stage.fill()


def metered(work: Callable[[MeteredLoop], Coroutine[Any, Any, Figures]]) -> Figures:
    """Run something in virtual time, with the collector set as `serve` sets it."""
    loop = MeteredLoop()
    loop.set_exception_handler(lambda *_: None)  # what a case that went wrong leaves behind is not worth a line each
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(*COLLECTOR)

    async def run() -> Figures:
        return await work(loop)

    try:
        return loop.run_until_complete(run())
    finally:
        gc.set_threshold(*thresholds)
        loop.close()


def measure(engines: int, in_flight: int, routing: Routing = "least_tokens") -> Figures:
    """Run one case in virtual time."""

    async def case(loop: MeteredLoop) -> Figures:
        return await _measure(Stage(engines, in_flight, routing=routing), loop)

    return metered(case)
