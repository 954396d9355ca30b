"""What a request, a pause and a look cost does not depend on how much else there is: counted in operations."""

from __future__ import annotations

import asyncio
import gc

import pytest

from bench import virtual
from rollout_svc.config import Routing
from tests.simulation.scale.pauses import KINDS, measure_pause
from tests.simulation.scale.stage import Stage
from tests.support.counting import counting

_SLACK = 1.2  # of a cost for each: what is done once for all of them, and logarithms


def cost(engines: int, in_flight: int, routing: Routing = "least_tokens") -> dict[str, float]:
    """Lines of Python that run, for each request or engine, of what the service does with so many of them."""
    found: dict[str, float] = {}

    async def play() -> None:
        stage = Stage(engines, in_flight, routing=routing)
        with counting() as begun:
            await stage.start()
        found["start, an engine"] = begun.lines / engines
        with counting() as filled:
            await stage.fill()
        found["a request"] = filled.lines / in_flight
        with counting() as turned:
            await stage.turn_over(in_flight // 2)
        found["a sample"] = turned.lines / (in_flight // 2)
        with counting() as looked:
            stage.service.status()
        found["a status"] = looked.lines
        with counting() as paused:
            report = await stage.service.pause(deadline_s=30.0)
        assert report.clean
        found["a pause, a request"] = paused.lines / in_flight
        with counting() as resumed:
            await stage.service.resume()
            await stage.fill()
        found["again, a request"] = resumed.lines / in_flight
        await stage.service.stop()

    virtual.run(play())
    return found


@pytest.mark.parametrize("routing", ["least_tokens", "round_robin"])
def test_a_request_costs_the_same_in_a_larger_fleet(routing: Routing) -> None:
    """Eight times as many engines with the same requests: no request, answer or engine costs more."""
    few, many = cost(8, 512, routing), cost(64, 512, routing)
    for what in ("start, an engine", "a request", "a sample", "again, a request"):
        assert many[what] < _SLACK * few[what], (what, few, many)


def test_a_request_costs_the_same_among_more_of_them() -> None:
    """Four times as many requests: none costs more, nor does its part of a pause, nor a status as a whole."""  # P8
    few, many = cost(8, 256), cost(8, 1024)
    for what in ("a request", "a sample", "a status", "a pause, a request", "again, a request"):
        assert many[what] < _SLACK * few[what], (what, few, many)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_ends_what_it_meets(kind: str) -> None:
    """Hundreds of each kind: the pause is over in time and accounts for every one of them."""  # P8, P9, P12, P13
    measure_pause(kind, 4, 320)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_pause_meets_costs_the_same_among_more_of_it(kind: str) -> None:
    """Four times as many of a kind: none costs more."""  # P8
    costs = []
    for number in (320, 1280):
        with counting() as counted:
            measure_pause(kind, 4, number)
        costs.append(counted.lines / number)
    assert costs[1] < _SLACK * costs[0]


def test_nothing_is_left_of_a_stage() -> None:
    """A service that has stopped leaves no task behind, however many it had."""  # P11
    left: list[str] = []

    async def play() -> None:
        stage = Stage(32, 512)
        await stage.start()
        await stage.fill()
        await stage.service.stop()
        await asyncio.sleep(1.0)
        left.extend(task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()})

    virtual.run(play())
    gc.collect()
    assert left == []
