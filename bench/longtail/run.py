"""One cell: the service in process, a virtual engine, a virtual trainer.

The trainer asks for batch after batch. One that shares its machines with the engines (`sync`, `async`) pauses the
stage, trains, updates and resumes; its training takes no time here, for while it trains there are no slots that could
be busy. One with machines of its own trains while generation goes on, for half of the time in which full slots would
make a batch, and then updates with a pause.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final, NoReturn

from bench import virtual
from bench.longtail.cases import BATCH, TASK, Cell
from bench.longtail.engine import TracedEngine, TracedTransport
from bench.longtail.outcome import HandOver, Outcome, outcome, warm_up
from bench.longtail.trace import TOKEN_S, Trace
from rollout_svc.buffer.storage import Position
from rollout_svc.errors import NotNow
from rollout_svc.outside import Outside
from rollout_svc.producer.sources import PushSource
from rollout_svc.service import RolloutService

if TYPE_CHECKING:
    from rollout_svc.batch import Batch

__all__ = ["run_cell", "timed", "train_s"]

_URL: Final = "http://trace:1"
_TRAIN_SHARE: Final = 0.5
"""A batch's training over its generation in full slots: a trainer that would wait half of its time."""
_TAKE_TIMEOUT_S: Final = 10_000.0
"""No batch takes nearly as long."""


class _NoProcesses:
    """The judger runs in the loop: no process is ever asked for."""

    def submit(self, spec: Any, method: str, payload: Any, timeout_s: float) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise AssertionError("a process was asked for")

    async def close(self) -> None:
        """Nothing to close."""


class _OnePass(PushSource):
    """The prompts of the trace, once; says when it is dry."""

    dry_at_s = 0.0

    def advance(self) -> Position:
        """Use a prompt up."""
        position = super().advance()
        if not self._lines:
            self.exhausted = True
            self.dry_at_s = asyncio.get_running_loop().time()
        return position


def train_s(trace: Trace, cell: Cell) -> float:
    """How long a trainer with machines of its own trains on a batch, seconds."""
    return _TRAIN_SHARE * cell.waves * trace.mean_tokens * TOKEN_S


@dataclass(slots=True)
class _Trainer:
    """Takes every batch there is."""

    cell: Cell
    trace: Trace
    service: RolloutService
    engine: TracedEngine
    hand_overs: list[HandOver] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Until the prompts are used up."""
        step = 0
        while (batch := await self._take(step)) is not None:
            self.trained += [int(group.prompt.prompt_id) for group in batch.groups]
            if self.cell.strategy.colocated:
                await self.service.pause()
                await self._update(step + 1)
                await self.service.ack(batch.batch_id)
                await self.service.resume()
            else:
                await asyncio.sleep(train_s(self.trace, self.cell))
                await self._update(step + 1)
                await self.service.ack(batch.batch_id)
            step += 1

    async def _take(self, step: int) -> Batch | None:
        """The next batch; once the prompts are used up, whatever can still come as one, and None after that."""
        groups = BATCH
        while groups:
            try:
                batch = await self.service.lease_batch(step, groups, _TAKE_TIMEOUT_S)
            except NotNow as refusal:
                if refusal.type != "exhausted":
                    raise
                groups = min(groups - 1, self.service.parts.ledger.unsettled_groups)
            else:
                if groups == BATCH:
                    self.hand_overs.append(HandOver(asyncio.get_running_loop().time(), self.engine.busy_s()))
                return batch
        return None

    async def _update(self, version: int) -> None:
        await self.service.update_weights(version, {"kind": "external"}, {})


async def _play(cell: Cell, trace: Trace) -> Outcome:
    engine = TracedEngine(trace)
    ids = Random(f"ids:{cell.case('')}")
    service = RolloutService(
        cell.config(_URL),
        rng=Random(0),
        outside=Outside(
            transport=lambda: TracedTransport(engine),
            processes=_NoProcesses,
            new_id=lambda: f"{ids.getrandbits(128):032x}",
            probes=False,
        ),
    )
    source = _OnePass(refused={})
    source.push(
        [{"id": str(number), "input_ids": [number], "ground_truth": [0]} for number in range(len(trace.tokens))]
    )
    service.prepared.sources[TASK] = source
    await service.start()
    await service.set_concurrency(limits={"w0": cell.slots})
    await service.ready()
    trainer = _Trainer(cell, trace, service, engine)
    try:
        await trainer.run()
    finally:
        busy_s = engine.busy_s()
        await service.stop()
    if engine.most > cell.slots:
        raise RuntimeError(f"{engine.most} requests at once at an engine of {cell.slots} slots")
    return outcome(
        trace,
        cell.slots,
        trainer.hand_overs,
        trainer.trained,
        warm=warm_up(cell.staleness),
        dry_at_s=source.dry_at_s,
        busy_s=busy_s,
    )


def run_cell(cell: Cell, trace: Trace) -> Outcome:
    """Play a cell in virtual time.

    Raises:
        NotNow: the service could not give a batch, and says why.
        RuntimeError: a request waited within the engine, or too few batches came.
    """
    return virtual.run(_play(cell, trace))


def timed(cell: Cell, trace: Trace) -> tuple[Outcome, float]:
    """Play a cell; returns with it the seconds of this processor that it took."""
    start = time.process_time()
    return run_cell(cell, trace), time.process_time() - start
