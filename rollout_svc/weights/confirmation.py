"""Whether an engine has the weights it should have, by what it generates.

Invariants:

- Asked once it has them and its caches are flushed, while the gate is closed. The request goes to each engine behind
  a worker itself and counts as nobody's: what it cannot finish in time is aborted before anybody goes on.
- Who is being asked is in `asking`: it runs something of ours that is in nobody's books, so no weights move to it.
- An engine whose requests are frozen, or that is asleep, generates nothing, and is not asked.
- Without a known answer nothing is asked, and what an engine without labels has is our word: said in the answer of the
  update, and once in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Endpoint, GenerateRequest, Transport
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.events import EventBus, WeightsUnconfirmed
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.probe import Probe
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker

__all__ = ["CONTRADICTED", "Confirmation"]

CONTRADICTED: Final = "contradicted"
"""The kind of failure of an engine that was not seen to have the weights it should have."""
_PROBE_S: Final = 30.0  # seconds an idle engine has for a handful of tokens; its kernels may have to warm up first


class Confirmation:
    """Asks engines for a known answer; see the module's invariants.

    Attributes:
        asking: ids of the workers that are asked now.
    """

    def __init__(
        self, *, pool: WorkerPool, transport: Transport, bus: EventBus, presence: Presence, new_id: Callable[[], str]
    ) -> None:
        self._pool = pool
        self._presence = presence
        self._transport = transport
        self._bus = bus
        self._new_id = new_id
        self.asking: set[str] = set()
        self._told: set[str] = set()  # workers of which it was said that nobody confirms what they have

    async def confirm_all(
        self, workers: Iterable[Worker], version: int, probe: Probe | None, results: dict[str, Any], phases: Phases
    ) -> None:
        """See that those have the weights whose result says so; one that does not is odd, and out of traffic.

        Args:
            workers: who was updated.
            version: what they should have.
            probe: the known answer.
            results: of the update, by worker id; what is found is written there.
            phases: where the time is counted, if anybody is asked.
        """
        brought = [worker for worker in workers if results[worker.worker_id]["ok"]]
        asked = any(_asks(worker, probe) for worker in brought)
        with phases.during("confirm") if asked else nullcontext():
            found = await asyncio.gather(*(self._confirmed(worker, version, probe) for worker in brought))
        for worker, outcome in zip(brought, found, strict=True):
            results[worker.worker_id] |= outcome

    async def confirm(self, worker: Worker, version: int, probe: Probe | None) -> dict[str, Any]:
        """See that a worker has the weights of a version.

        Returns:
            What the update's answer says of it: `probed` where it was asked, `confirmed: false` where nobody knows.

        Raises:
            WorkerFailure: `contradicted`: it generates something else, or nothing; nobody knows what it has now.
        """
        worker.contradiction = None  # it was of other weights
        if probe is None or not _asks(worker, probe):
            return self._unasked(worker, version)
        if worker.frozen or worker.asleep:  # it generates nothing, whatever it is asked
            return {"probed": False, **self._unasked(worker, version)}
        self.asking.add(worker.worker_id)
        try:
            said = await asyncio.gather(*(self._ask(worker, engine, probe) for engine in worker.engines))
        finally:
            self.asking.discard(worker.worker_id)
        for engine, words in zip(worker.engines, said, strict=True):
            if words is not None:
                name = "" if worker.front is None else f"{engine.url}: "
                worker.version, worker.contradiction = None, f"the probe of version {version}: {name}{words}"
                raise WorkerFailure(CONTRADICTED, worker.contradiction)
        self._told.discard(worker.worker_id)
        return {"probed": True}

    async def _confirmed(self, worker: Worker, version: int, probe: Probe | None) -> dict[str, Any]:
        """What is found of one worker, for its result."""
        found: dict[str, Any] = {}

        async def look() -> None:
            found.update(await self.confirm(worker, version, probe))

        try:
            await self._presence.during(worker, look())
        except WorkerFailure as failure:
            if worker.contradiction is not None:
                worker.put_in_quarantine("version", worker.contradiction)
            return {"ok": False, "version": worker.version, "error": str(failure)}
        return found

    def _unasked(self, worker: Worker, version: int) -> dict[str, Any]:
        if worker.labels:
            return {}
        if worker.worker_id not in self._told:
            self._told.add(worker.worker_id)
            self._bus.emit(WeightsUnconfirmed(worker.worker_id, version))
        return {"confirmed": False}

    async def _ask(self, worker: Worker, engine: Endpoint, probe: Probe) -> str | None:
        """Why one engine is not believed; None where it gave the known answer."""
        count = len(probe.response_ids)
        sampling = SamplingConfig(max_tokens=count, temperature=0.0)
        request = GenerateRequest(self._new_id(), list(probe.prompt_ids), count, sampling)
        answered = False
        try:
            async with asyncio.timeout(_PROBE_S):
                reply = await self._transport.data(engine, worker.dialect.generate(request))
            answered = True
            completion = worker.dialect.parse_generate(reply)
        except (WorkerFailure, SampleFailure) as failure:
            return f"no answer: {failure}"
        except TimeoutError:
            return f"no answer within {_PROBE_S:g} s"
        finally:
            if not answered:
                await self._pool.abort(worker, [request.request_id])
        return probe.contradicted(completion.ids, completion.logprobs)


def _asks(worker: Worker, probe: Probe | None) -> bool:
    """Whether it is to show what it has."""
    return probe is not None and (probe.every or not worker.labels)
