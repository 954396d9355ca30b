"""Every control call to a worker.

Invariants:

- A control call goes to each engine behind the worker itself, never through what may stand in front of them.
- What they answer counts as one answer only where they agree.
- One short attempt each; repeating is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from rollout_svc.engines import Call, Dialect, Endpoint, EngineInfo, EngineProfile, Health, Reply, Transport
from rollout_svc.errors import WorkerFailure
from rollout_svc.workers.worker import Worker

__all__ = ["CONTROL_TIMEOUT_S", "Control"]

CONTROL_TIMEOUT_S: Final = 2.0  # seconds for one short control attempt; repeating is the caller's

T = TypeVar("T")


class Control:
    """The control lane to workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def probe(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> EngineProfile:
        """Find out what the worker's engine is, and have it spoken to in its dialect from now on.

        Raises:
            WorkerFailure: it is not there, refuses the key, is unfit, or is none of the engines it may be.
        """
        failures: list[WorkerFailure] = []
        for dialect in worker.candidates:
            try:
                profiles = await self._each(worker, partial(self._probe, dialect, timeout_s))
            except WorkerFailure as failure:
                if failure.kind != "wrong_dialect":
                    raise
                failures.append(failure)
            else:
                worker.introduce(dialect, profiles[0])
                return profiles[0]
        names = " nor ".join(dialect.name for dialect in worker.candidates)
        raise WorkerFailure("wrong_dialect", f"it is not {names}: {'; '.join(map(str, failures))}", hard=True)

    async def _probe(self, dialect: Dialect, timeout_s: float, engine: Endpoint) -> EngineProfile:
        async def ask(call: Call) -> Reply | WorkerFailure:
            try:
                return await self._transport.control(engine, call, timeout_s)
            except WorkerFailure as failure:
                return failure

        return dialect.parse_probe([await ask(call) for call in dialect.probe()])

    async def info(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> EngineInfo:
        """Ask for the weight label, which has to be the same at each engine; raises WorkerFailure."""

        async def ask(engine: Endpoint) -> EngineInfo:
            return worker.dialect.parse_info(await self._transport.control(engine, worker.dialect.info(), timeout_s))

        infos = await self._each(worker, ask)
        if any(info.weight_label != infos[0].weight_label for info in infos):
            labels = ", ".join(f"{e.url}: {i.weight_label}" for e, i in zip(worker.engines, infos, strict=True))
            raise WorkerFailure("disagree", f"the engines behind it have different weights: {labels}")
        processes = [info.process for info in infos if info.process is not None]
        together = " ".join(processes) if len(processes) == len(infos) else None
        return replace(infos[0], process=together)

    async def ping(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> Health:
        """Probe; raises WorkerFailure where nobody answers."""

        async def ask(engine: Endpoint) -> Health:
            return worker.dialect.parse_ping(await self._transport.control(engine, worker.dialect.ping(), timeout_s))

        return min(await self._each(worker, ask), key=lambda health: (health.alive, health.ready))

    async def count(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> int | None:
        """The engines' own count of running and waiting requests; None when it cannot be had.

        Where we know that no process runs, nothing does.
        """

        async def ask(engine: Endpoint) -> int:
            return worker.dialect.parse_loads(await self._transport.control(engine, worker.dialect.loads(), timeout_s))

        if worker.absent:
            return 0
        if "count" not in worker.capabilities:
            return None
        try:
            return sum(await self._each(worker, ask))
        except WorkerFailure:
            return None

    async def do(self, worker: Worker, calls: Iterable[Call], timeout_s: float) -> None:
        """Make calls one after the other, at every engine; raises the first WorkerFailure, after all engines ended."""
        calls = list(calls)

        async def make(engine: Endpoint) -> None:
            for call in calls:
                worker.dialect.parse_done(await self._transport.control(engine, call, timeout_s))

        await self._each(worker, make)

    @staticmethod
    async def _each(worker: Worker, visit: Callable[[Endpoint], Awaitable[T]]) -> list[T]:
        """Visit every engine behind a worker at once; all have been when this returns or raises."""
        if len(worker.engines) == 1:
            return [await visit(worker.engines[0])]
        results = await asyncio.gather(*map(visit, worker.engines), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]
        return [result for result in results if not isinstance(result, BaseException)]
