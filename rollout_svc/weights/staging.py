"""Weights from a publisher: bucket by bucket to every engine, which stages them beside those it has.

The publisher is asked (`POST /begin`, then `/next` until there is none, then `/end`); engines are told what it answers,
all of them at once, and the next bucket is asked for when each has the last.

Invariants:

- No engine computes with anything of an update before all of them have all of it.
- One that fails ends the update for all: what was staged is forgotten everywhere, and nothing has changed.
- The publisher is told how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollout_svc.engines import Call, Endpoint, Transport, buckets
from rollout_svc.engines.parsing import control_body
from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker

__all__ = ["Staging"]

_END_S = 10.0  # seconds for taking leave of everybody


class Staging:
    """Carries buckets from a publisher to engines; see the module's invariants."""

    def __init__(self, transport: Transport, control: Control, presence: Presence, timeout_s: float) -> None:
        self._transport = transport
        self._control = control
        self._presence = presence
        self._timeout_s = timeout_s

    async def stage(self, workers: Sequence[Worker], publisher: Endpoint, phases: Phases) -> dict[str, str]:
        """Have every worker stage what a publisher has.

        Returns:
            why it failed, by worker id; all of them where it was the publisher. Empty: they have all of it.
        """
        lacking = {w.worker_id: _lack(w) for w in workers if buckets.CAPABILITY not in w.capabilities}
        if lacking:
            return lacking
        failed: dict[str, str] = {}
        try:
            failed = await self._stage(workers, publisher, phases)
        except WorkerFailure as failure:
            failed = {worker.worker_id: f"the publisher: {failure}" for worker in workers}
        finally:
            # Also where the caller was cancelled: an engine that waits for the rest would keep what it has staged.
            await asyncio.shield(self._leave(workers, publisher, whole=not failed))
        return failed

    async def _stage(self, workers: Sequence[Worker], publisher: Endpoint, phases: Phases) -> dict[str, str]:
        with phases.during("transfer"):
            opening = await self._ask(publisher, "/begin")
        begin = buckets.begin(opening.get("manifest"), check_finite=opening.get("check_finite") is True)
        with phases.during("load"):
            failed = await self._all(workers, begin)
        while not failed:
            answer = await self._next(publisher, phases)
            call = answer.get("call")
            if call is None:
                return {}
            with phases.during("load"):
                failed = await self._all(workers, buckets.bucket(call))
            if not failed:
                phases.staged(int(answer.get("bytes", 0)))
        return failed

    async def _next(self, publisher: Endpoint, phases: Phases) -> dict[str, Any]:
        """The next bucket; it says itself for how long it was flattened."""
        asked = asyncio.get_running_loop().time()
        answer = await self._ask(publisher, "/next")
        took_s = asyncio.get_running_loop().time() - asked
        flatten_s = min(float(answer.get("flatten_s", 0.0)), took_s)
        phases.add("flatten", flatten_s)
        phases.add("transfer", took_s - flatten_s)
        return answer

    async def _all(self, workers: Sequence[Worker], call: Call) -> dict[str, str]:
        """Make a call at every worker; why it failed, by id."""

        async def one(worker: Worker) -> str | None:
            try:
                await self._presence.during(worker, self._control.do(worker, [call], self._timeout_s))
            except WorkerFailure as failure:
                return str(failure)
            return None

        said = await asyncio.gather(*(one(worker) for worker in workers))
        return {worker.worker_id: words for worker, words in zip(workers, said, strict=True) if words is not None}

    async def _ask(self, publisher: Endpoint, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        call = Call("POST", path, orjson.dumps(body or {}), admin=True)
        return control_body(await self._transport.control(publisher, call, self._timeout_s))

    async def _leave(self, workers: Sequence[Worker], publisher: Endpoint, *, whole: bool) -> None:
        """Tell everybody that it is over; nobody has to answer."""

        async def tell_publisher() -> None:
            call = Call("POST", "/end", orjson.dumps({"whole": whole}), admin=True)
            await self._transport.control(publisher, call, _END_S)

        async def tell_engine(worker: Worker) -> None:
            await self._control.do(worker, [buckets.abandon()], _END_S)

        telling = [tell_publisher(), *([] if whole else [tell_engine(worker) for worker in workers])]
        await asyncio.gather(*telling, return_exceptions=True)


def _lack(worker: Worker) -> str:
    return f"cannot: {worker.dialect.name} takes no weights from shared memory here"
