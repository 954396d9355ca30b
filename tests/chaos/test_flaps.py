"""Pause and resume, again and again, under load: nothing grows."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass
from statistics import linear_regression, mean
from typing import Final

import pytest

from bench.process import Child
from tests.chaos.leaks import held, resident_bytes
from tests.chaos.site import DEADLINE_S, GROUP_SIZE, SMOKE, Site, run, site

IN_FLIGHT: Final = 256
FLAPS: Final = 100 if SMOKE else 1000
DELAY_S: Final = 0.05
"""What the engine takes for an answer, in seconds."""
UNDER_WAY: Final = IN_FLIGHT // 2
"""Requests under way, at least, when a pause begins."""
BATCH: Final = 8
CONTROL: Final = 8
"""Control connections that a worker has at most."""
BOUND_BYTES: Final = 4096
"""Growth of resident memory a flap: one page. Live objects do not grow, and are counted; the allocator still spreads
out, by less than a page a flap, and less with every hundred. A call left behind, with its answer and its sample, is
several pages."""
OBJECTS: Final = 2
"""Growth of live objects a flap: a single call that is left behind is dozens."""
NOISE: Final = 3000
"""Objects by which two pauses differ: what was ready, and how far answers had come."""
SIGMAS: Final = 3.0
"""How many standard errors a slope may lie above the bound before it is more than noise."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Bytes a flap, with its standard error."""

    value: float
    error: float


def slope(series: list[int]) -> Slope:
    """Fit a line to a series, by least squares."""
    steps = range(len(series))
    fit = linear_regression(steps, series)
    residuals = [y - fit.slope * x - fit.intercept for x, y in zip(steps, series, strict=True)]
    middle = mean(steps)
    spread = sum((x - middle) ** 2 for x in steps)
    return Slope(fit.slope, (sum(r * r for r in residuals) / (len(series) - 2) / spread) ** 0.5)


@pytest.mark.timeout(900)
def test_flaps_leave_nothing_behind() -> None:
    """1,000 pauses and resumes under load, each clean: no task, socket or file more, and memory stays."""  # P11 P30
    with Child("bench.canned", "--delay", DELAY_S, "--weight-version", "0") as engine:
        memory = run(_flap(f"http://127.0.0.1:{engine.ready_line[0]}", FLAPS))
    found = slope(memory[len(memory) // 2 :])
    print(  # noqa: T201 - shown by `-s`
        f"{FLAPS} flaps: {memory[0] / 1e6:.1f} MB at first, {memory[-1] / 1e6:.1f} MB at last; second half: "
        f"{found.value:.0f} bytes a flap, standard error {found.error:.0f}"
    )
    if not SMOKE:  # fewer do not outlast the warming up of the allocator
        assert found.value - SIGMAS * found.error <= BOUND_BYTES
        assert found.value <= 4 * BOUND_BYTES


async def _flap(url: str, flaps: int) -> list[int]:
    before = held()
    async with site([url], IN_FLIGHT) as made:
        taking = made.start(_take_on(made))
        memory: list[int] = []
        objects: list[int] = []
        tasks = 0
        for number in range(flaps):
            await _until_under_way(made)
            report, _ = await made.timed_pause()
            assert report.clean
            if number == flaps // 10:
                tasks = len(asyncio.all_tasks())
            if number in (flaps // 2, flaps - 1):
                gc.collect()
                objects.append(len(gc.get_objects()))
            memory.append(resident_bytes())
            await made.service.resume()
        await made.service.pause(deadline_s=DEADLINE_S)
        assert len(asyncio.all_tasks()) <= tasks
        assert objects[1] - objects[0] <= OBJECTS * (flaps - flaps // 2) + NOISE, objects
        opened = (held() - before)["files"]
        assert isinstance(opened, Counter)
        assert set(opened) == {"socket"}
        assert opened["socket"] <= IN_FLIGHT + CONTROL
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()
        return memory


async def _until_under_way(made: Site) -> None:
    """Wait until enough was sent: the answers of some are the bell for the rest."""
    await made.until(lambda: made.in_flight >= UNDER_WAY)


async def _take_on(made: Site) -> None:
    """Take batches for as long as the test lasts, so that there is room for more."""
    batch_id: list[str] = []
    while True:
        batch = await made.service.take_batch(0, BATCH, 60.0, batch_id)
        assert len(batch["groups"][0]["samples"]) == GROUP_SIZE
        batch_id = [batch["batch_id"]]
