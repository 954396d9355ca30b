"""A pause over two engines, the first struck by a fault: in time, honest, with nothing lost and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from rollout_svc.pause.report import PauseReport
from rollout_svc.workers.worker import WorkerState
from tests.chaos.engines import ChaosProcess
from tests.chaos.leaks import children
from tests.chaos.site import DEADLINE_S, SMOKE, Site, run, site
from tests.chaos.table import Row, write_table
from tests.support.chaos_engine import STATUSES

SIZES = (256,) if SMOKE else (256, 4096)
BATCH = 4
"""Groups of a batch that is taken after resume."""
ANSWER_S = 0.2
"""What the healthy engine takes for an answer, in seconds, once it is to answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and what a pause has to say about it.

    Attributes:
        name: as the engine knows it; `sigkill` and `sigstop` strike its process.
        left: whether the requests there are abandoned: always, never, or only without handler cancellation.
        counts: whether the engine can be asked what it runs.
        hurts: it fails samples rather than workers, so batches are taken once it is gone.
    """

    name: str
    left: Literal["always", "never", "unheard"] = "never"
    counts: bool = True
    hurts: bool = False

    def leaves(self, cancellation: str) -> bool:
        """Whether something is abandoned."""
        return self.left == "always" or (self.left == "unheard" and cancellation == "off")


FAULTS = (
    Fault("black_hole", left="always", counts=False),
    Fault("late", left="always", counts=False),
    Fault("sigstop", left="always", counts=False),
    Fault("sigkill", counts=False),
    Fault("deaf", left="unheard"),
    Fault("slow_loris"),
    Fault("reset"),
    Fault("garbage", hurts=True),
    Fault("status:all", hurts=True),
)
SINGLE = tuple(
    Fault(f"status:{status}", hurts=status < 500 and status not in (401, 403, 404, 429)) for status in STATUSES
)
CASES = [(fault, size, handler) for size in SIZES for fault in FAULTS for handler in ("off", "on")] + [
    (fault, size, "off") for size in SIZES for fault in SINGLE if not SMOKE
]


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """The rows of the table, written at the end."""
    made: list[Row] = []
    yield made
    write_table(made)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "in_flight", "handler"), CASES, ids=[f"{fault.name}-{size}-{handler}" for fault, size, handler in CASES]
)
def test_a_pause_under_a_fault(fault: Fault, in_flight: int, handler: Literal["on", "off"], rows: list[Row]) -> None:
    """Back by its deadline; what is left is named where it is; the stage goes on; nothing leaks."""  # P8 P9 P12
    before = set(children())
    with ChaosProcess(handler) as struck, ChaosProcess(handler) as healthy:
        rows.append(run(_scenario(fault, in_flight, handler, struck, healthy)))
    assert set(children()) == before


async def _scenario(fault: Fault, in_flight: int, handler: str, struck: ChaosProcess, healthy: ChaosProcess) -> Row:
    async with site([struck.url, healthy.url], in_flight) as made:
        await asyncio.gather(struck.running(in_flight // 2), healthy.running(in_flight // 2))
        await _strike(fault, struck)
        report, elapsed_s = await made.timed_pause()
        _check(fault, handler, in_flight, report)
        assert made.groups("admitted") == made.groups("aborted") + made.groups("failed")
        if fault.leaves(handler):
            assert made.worker(0).state is WorkerState.QUARANTINED
        if fault.hurts:
            await struck.command(fault="none")
        batch_id = await _go_on(made, healthy)
        await _heal(fault, made, struck, batch_id)
    return Row.of(fault.name, in_flight, handler, elapsed_s, DEADLINE_S, report)


async def _strike(fault: Fault, engine: ChaosProcess) -> None:
    if fault.name == "sigkill":
        engine.kill()
    elif fault.name == "sigstop":
        engine.freeze()
    else:
        await engine.command(fault=fault.name)


def _check(fault: Fault, handler: str, in_flight: int, report: PauseReport) -> None:
    """The report names what is left, at the worker where it is, and nothing else."""
    struck, healthy = report.workers["w0"], report.workers["w1"]
    assert (healthy.in_flight, healthy.answered, healthy.abandoned, healthy.residual) == (
        in_flight // 2, in_flight // 2, 0, 0,
    )  # fmt: skip
    assert struck.in_flight == in_flight // 2
    left = in_flight // 2 if fault.leaves(handler) else 0
    assert (struck.abandoned, len(report.abandoned), report.clean) == (left, left, not left)
    assert {item.worker for item in report.abandoned} <= {"w0"}
    assert len({item.sample_id for item in report.abandoned if item.sample_id is not None}) == left
    if fault.counts:
        assert struck.residual == left
    else:
        assert struck.residual is None


async def _go_on(made: Site, healthy: ChaosProcess) -> str:
    """Resume, with the fault still there where it is the worker's: the healthy engine's answers become a batch."""
    await healthy.command(delay_s=ANSWER_S)
    await made.service.resume()
    batch = await made.take(groups=BATCH)
    assert len(batch["groups"]) == BATCH
    assert {sample["status"] for group in batch["groups"] for sample in group["samples"]} == {"COMPLETED"}
    return str(batch["batch_id"])


async def _heal(fault: Fault, made: Site, engine: ChaosProcess, batch_id: str) -> None:
    """The engine is well again: it gets traffic, and answers it."""
    if fault.name == "sigkill":
        await asyncio.to_thread(engine.come_back)
    elif fault.name == "sigstop":
        engine.go_on()
    await engine.command(fault="none", delay_s=ANSWER_S)
    worker = made.worker(0)
    await made.until(lambda: worker.state is WorkerState.ACTIVE, "it comes back")
    answered, ack = worker.answered, [batch_id]
    while worker.answered == answered:  # the buffer may be full by now: what is consumed makes room for more
        ack = [(await made.take(groups=BATCH, ack=ack))["batch_id"]]
