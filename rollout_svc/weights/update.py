"""The update protocol: all workers or none in name, confirmed by the engines.

Invariants:

- No weights move to a worker that runs a request of ours, is quarantined for one, or is not there.
- Only a worker in traffic can fail an update: one that is out already is brought along where it answers, else listed.
- After an update every worker in traffic reports the version, or it is named in the answer and out of traffic.
- A failure is an error, never a partial success: the caller's pause stays.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_svc.errors import NotNow, WorkerFailure
from rollout_svc.events import EventBus, WeightsUpdated
from rollout_svc.weights.fleet import Fleet, Source
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["WeightUpdater"]


class WeightUpdater:
    """Carries one update to every worker that can take it."""

    def __init__(self, *, fleet: Fleet, pool: WorkerPool, bus: EventBus) -> None:
        self._fleet = fleet
        self._pool = pool
        self._bus = bus

    async def update(self, version: int, source: Source) -> dict[str, Any]:
        """Bring the fleet to `version`; the caller has made sure that every lane is drained.

        Returns:
            `{"version", "workers": {id: {"ok", "version", ...}}}`.

        Raises:
            NotNow: `update_failed`, with the same record as `detail`.
        """
        started = asyncio.get_running_loop().time()
        with self._fleet.updating():
            in_traffic = [w for w in self._pool.workers.values() if w.state is WorkerState.ACTIVE and not w.calls]
            targets = in_traffic + await self._waiting_for_weights()
            results: dict[str, dict[str, Any]] = {
                worker.worker_id: {"ok": False, "skipped": f"{worker.state}: {worker.reason}"}
                for worker in self._pool.workers.values()
                if worker not in targets
            }
            previous = self._fleet.version
            outcomes = await asyncio.gather(*(self._update_one(w, version, source, previous) for w in targets))
            results.update({w.worker_id: outcome for w, outcome in zip(targets, outcomes, strict=True)})
            updated = [worker for worker in targets if results[worker.worker_id]["ok"]]
            odd = [worker for worker in in_traffic if not results[worker.worker_id]["ok"]]
            if updated:
                self._fleet.version = version
                self._fleet.source = source
            self._take_out(odd)
        for worker in updated:
            if worker.quarantine is not None:
                worker.attention.set()
        self._pool.fleet_changed()
        ok = bool(updated) and not odd
        seconds = asyncio.get_running_loop().time() - started
        names = tuple(worker.worker_id for worker in odd)
        self._bus.emit(WeightsUpdated(version, source.kind, seconds, ok, names))
        record = {"version": self._fleet.version, "workers": results}
        if not updated and not odd:
            raise NotNow("update_failed", "no worker is left to update", detail=record)
        if odd:
            message = f"version {version} did not reach {', '.join(names)}; the fleet is at {self._fleet.version}"
            raise NotNow("update_failed", message, detail=record)
        return record

    async def _waiting_for_weights(self) -> list[Worker]:
        """Workers that are out of traffic for their version alone, and answer: they are brought along."""
        waiting = [
            worker
            for worker in self._pool.workers.values()
            if worker.quarantine is not None and worker.quarantine.kind == "version" and not worker.calls
        ]
        await asyncio.gather(*(self._ask(worker) for worker in waiting))
        return [worker for worker in waiting if worker.version is not None]

    def _take_out(self, odd: list[Worker]) -> None:
        """Keep from traffic whoever does not report the fleet's version."""
        for worker in odd:
            if worker.version != self._fleet.version and worker.state is WorkerState.ACTIVE:
                reason = f"the update failed here; it reports {worker.version}, the fleet is at {self._fleet.version}"
                worker.put_in_quarantine("version", reason)

    async def _update_one(self, worker: Worker, version: int, source: Source, previous: int) -> dict[str, Any]:
        try:
            if source.path is not None:
                await self._fleet.load(worker, source.path, version)
            else:
                await self._adopt(worker, version, previous)
        except WorkerFailure as failure:
            await self._ask(worker)
            return {"ok": False, "version": worker.version, "error": str(failure)}
        if worker.version != version:
            return {"ok": False, "version": worker.version, "error": f"it reports version {worker.version}"}
        return {"ok": True, "version": version}

    async def _adopt(self, worker: Worker, version: int, previous: int) -> None:
        """`external`: the trainer moved the weights; the label is ours to check, and to set where it lags."""
        await self._fleet.read_label(worker)
        if worker.version == previous and previous != version:
            await self._fleet.set_label(worker, version)
        elif worker.version != version:
            raise WorkerFailure("odd_version", f"it reports {worker.version}, neither {previous} nor {version}")
        await self._fleet.flush(worker)

    async def _ask(self, worker: Worker) -> None:
        """After a failure: which version does it say it has? Unknown where it does not answer."""
        try:
            await self._fleet.read_label(worker)
        except WorkerFailure:
            worker.version = None
