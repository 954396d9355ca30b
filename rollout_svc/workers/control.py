"""Every control call to a worker.

Invariants:

- A control call goes to each engine behind the worker itself, never through what may stand in front of them.
- What they answer counts as one answer only where they agree (`merging.py`); which of them failed is always named.
- What stands in front is asked nothing but whether it is there, and whom it sends to.
- One short attempt each; repeating is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Final, TypeVar

from rollout_svc.engines import Call, Dialect, Endpoint, EngineInfo, EngineProfile, Health, Reply, Transport
from rollout_svc.engines.parsing import OK
from rollout_svc.engines.router import LISTING, OWN, listed_engines, too_many
from rollout_svc.engines.updates.protocol import Ask
from rollout_svc.errors import ADMIN_KEY, WorkerFailure
from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.tensors.layouts import filled, read_layout
from rollout_svc.workers.merging import merged_failure, merged_info, merged_profile, total
from rollout_svc.workers.worker import Worker

__all__ = ["CONTROL_TIMEOUT_S", "Control"]

CONTROL_TIMEOUT_S: Final = 2.0  # seconds for one short control attempt; repeating is the caller's
_NOBODY: Final = "0" * 32  # a wire id that no request gets: ids are random
_REFUSED: Final = frozenset({401, 403})

T = TypeVar("T")


class Control:
    """The control lane to workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._files = CallThreads("layout")

    async def probe(
        self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S, *, try_key: bool = False
    ) -> EngineProfile:
        """Find out what the worker's engine is, and have it spoken to in its dialect from now on.

        Args:
            worker: whose engine.
            timeout_s: seconds for each question.
            try_key: find out whether it takes aborts from us also where they carry no key.

        Raises:
            WorkerFailure: it is not there, refuses a key, is unfit, or is none of the engines it may be.
        """
        failures: list[WorkerFailure] = []
        for dialect in worker.candidates:
            try:
                profiles = await self._each(worker, partial(self._probe, dialect, timeout_s))
                profile = merged_profile(profiles) if worker.front is not None else profiles[worker.engines[0].url]
            except WorkerFailure as failure:
                if failure.kind != "wrong_dialect":
                    raise
                failures.append(failure)
            else:
                await self._check_front(worker, timeout_s, first=True)
                if "abort" in profile.capabilities and (try_key or worker.endpoint.guarded):
                    await self._try_control_key(worker, dialect, timeout_s)
                profile = await self._with_layout(profile, timeout_s)
                worker.introduce(dialect, profile)
                return profile
        names = " nor ".join(dialect.name for dialect in worker.candidates)
        said = "; ".join(failure.message for failure in failures)
        raise WorkerFailure("wrong_dialect", f"it is not {names}: {said}", hard=True)

    async def _probe(self, dialect: Dialect, timeout_s: float, engine: Endpoint) -> EngineProfile:
        async def ask(call: Call) -> Reply | WorkerFailure:
            try:
                return await self._transport.control(engine, call, timeout_s)
            except WorkerFailure as failure:
                return failure

        return dialect.parse_probe([await ask(call) for call in dialect.probe()])

    async def _with_layout(self, profile: EngineProfile, timeout_s: float) -> EngineProfile:
        """Read what an engine does not say of its routing from its model's config, where that lies on this machine."""
        said = profile.experts
        folder = PurePath(profile.model or "")
        if "experts" not in profile.capabilities or None not in (said or (None,)) or not folder.is_absolute():
            return profile
        with contextlib.suppress(TimeoutError, NoThread):
            found = await self._files.call(partial(read_layout, str(folder)), timeout_s)
            profile = replace(profile, experts=filled(said, found))
        return profile

    async def _try_control_key(self, worker: Worker, dialect: Dialect, timeout_s: float) -> None:
        """Abort a request that never was: all that can come of it is that the key is refused."""
        call = dialect.abort([_NOBODY])[0]
        for engine in worker.engines:
            try:
                reply = await self._transport.control(engine, call, timeout_s)
            except WorkerFailure:
                return  # it answered the probe a moment ago; what came instead says nothing of the key
            if reply.status in _REFUSED:
                raise WorkerFailure(ADMIN_KEY, f"{call.method} {call.path}: HTTP {reply.status}", hard=True)

    async def info(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> EngineInfo:
        """Ask for the weight label; engines that do not agree have none together. Raises WorkerFailure."""

        async def ask(engine: Endpoint) -> EngineInfo:
            return worker.dialect.parse_info(await self._transport.control(engine, worker.dialect.info(), timeout_s))

        return merged_info(await self._each(worker, ask))

    async def ping(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> Health:
        """Probe; raises WorkerFailure where nobody answers."""

        async def ask(engine: Endpoint) -> Health:
            return worker.dialect.parse_ping(await self._transport.control(engine, worker.dialect.ping(), timeout_s))

        await self._check_front(worker, timeout_s)
        found = await self._each(worker, ask)
        if worker.front is None:
            return found[worker.engines[0].url]
        failed = {url: WorkerFailure("unhealthy", h.reason, accepted=True) for url, h in found.items() if not h.alive}
        if failed:
            raise merged_failure(failed, len(worker.engines))
        return Health(
            alive=True,
            ready=all(health.ready for health in found.values()),
            reason="; ".join(f"{url}: {health.reason}" for url, health in found.items() if not health.ready),
        )

    async def count(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> int | None:
        """The engines' own count of running and waiting requests; None when it cannot be had.

        Where we know that no process runs, nothing does.
        """
        return total((await self.counts(worker, timeout_s)).values())

    async def counts(self, worker: Worker, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, int | None]:
        """The same by engine; None for one that does not say."""

        async def ask(engine: Endpoint) -> int | None:
            try:
                reply = await self._transport.control(engine, worker.dialect.loads(), timeout_s)
                return worker.dialect.parse_loads(reply)
            except WorkerFailure:
                return None

        if worker.absent:
            return {engine.url: 0 for engine in worker.engines}
        if "count" not in worker.capabilities:
            return {engine.url: None for engine in worker.engines}
        return await self._each(worker, ask)

    async def do(self, worker: Worker, calls: Iterable[Call], timeout_s: float) -> None:
        """Make calls one after the other, at every engine; raises WorkerFailure, after all have ended."""
        calls = list(calls)

        async def make(engine: Endpoint) -> None:
            for call in calls:
                worker.dialect.parse_done(await self._transport.control(engine, call, timeout_s))

        await self._each(worker, make)

    async def at_each(
        self, worker: Worker, visit: Callable[[Endpoint, Ask], Awaitable[None]], timeout_s: float
    ) -> None:
        """Have a conversation with every engine behind it, at once; raises WorkerFailure, after all have ended."""

        async def talk(engine: Endpoint) -> None:
            await visit(engine, lambda call: self._transport.control(engine, call, timeout_s))

        await self._each(worker, talk)

    async def _check_front(self, worker: Worker, timeout_s: float, *, first: bool = False) -> None:
        """Raise WorkerFailure where nobody answers in front of the engines, or where it sends to others beside them.

        Where it does not list them it may be an engine itself, which the first look finds out: what it is sent would
        run where no control call goes.
        """
        if worker.front is None:
            return
        reply = await self._transport.control(worker.front, LISTING, timeout_s)
        listed = listed_engines(reply)
        strangers = too_many(listed, [engine.url for engine in worker.engines])
        if strangers is not None:
            raise WorkerFailure("unfit", f"{worker.front.url}: {strangers}", hard=True)
        if first and listed is None and (await self._transport.control(worker.front, OWN, timeout_s)).status == OK:
            words = f"it answers {OWN.method} {OWN.path}, as an engine does and no router: engines go into `engines`"
            raise WorkerFailure("unfit", f"{worker.front.url}: {words}", hard=True)

    @staticmethod
    async def _each(worker: Worker, visit: Callable[[Endpoint], Awaitable[T]]) -> dict[str, T]:
        """Visit every engine behind a worker at once; all have been when this returns or raises."""
        if worker.front is None:
            engine = worker.engines[0]
            return {engine.url: await visit(engine)}
        answers = await asyncio.gather(*map(visit, worker.engines), return_exceptions=True)
        failures: dict[str, WorkerFailure] = {}
        results: dict[str, T] = {}
        for engine, answer in zip(worker.engines, answers, strict=True):
            if isinstance(answer, WorkerFailure):
                failures[engine.url] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                results[engine.url] = answer
        if failures:
            raise merged_failure(failures, len(worker.engines))
        return results
