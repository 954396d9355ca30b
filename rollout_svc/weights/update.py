"""The update protocol: all workers or none in name, confirmed by the engines.

Invariants:

- No weights move to a worker that runs a request of ours, unless it is frozen with it, is quarantined for one, or is
  not there.
- Only a worker in traffic can fail an update: one that is out already is brought along where it answers, else listed.
- After an update every worker in traffic reports the version, or it is named in the answer and out of traffic.
- A failure is an error, never a partial success: the caller's pause stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rollout_svc.errors import NotNow, WorkerFailure
from rollout_svc.events import EventBus, WeightsUpdated
from rollout_svc.weights.fleet import Fleet, Source
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.staging import Publisher, Staged, Staging
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["WeightUpdater"]

_UNFLUSHED: Final = "unflushed"  # the kind of failure after which the label is right and the cache is not


class WeightUpdater:
    """Carries one update to every worker that can take it.

    Attributes:
        phases: of the update under way, or the last one; None before the first.
    """

    def __init__(self, *, fleet: Fleet, pool: WorkerPool, bus: EventBus, presence: Presence, staging: Staging) -> None:
        self.on_updated: Callable[[int], None] = lambda _: None
        self.phases: Phases | None = None
        self._presence = presence
        self._staging = staging
        self._fleet = fleet
        self._pool = pool
        self._bus = bus

    async def update(self, version: int, source: Source, phases: Phases, *, since: float) -> dict[str, Any]:
        """Bring the fleet to `version`; the caller has made sure that every lane is drained.

        Args:
            version: trainer steps whose weights these are.
            source: where they come from.
            phases: what the update has taken until now; its own are added.
            since: when the gate closed, loop time: a worker that came into traffic later was not there when the
                trainer moved weights itself, so its label is taken from nobody but itself.

        Returns:
            `{"version", "workers": {id: {"ok", "version", ...}}}`.

        Raises:
            NotNow: `update_failed`, with the same record as `detail`.
        """
        self.phases = phases
        started = asyncio.get_running_loop().time()
        active = [w for w in self._pool.workers.values() if w.state is WorkerState.ACTIVE and _still(w)]
        # From the look on: a stronger pause may join while the others are asked, and what is frozen must stay so.
        with self._fleet.updating(), _loading(active):
            in_traffic = [worker for worker in active if source.moves or _was_given(worker, source, since)]
            targets = active + await self._waiting_for_weights(source)
            results: dict[str, dict[str, Any]] = {
                worker.worker_id: {"ok": False, "skipped": f"{worker.state}: {worker.reason}"}
                for worker in self._pool.workers.values()
                if worker not in targets
            }
            previous = self._fleet.version
            staged = None
            if source.publisher is not None:
                staged = await self._stage(targets, source.publisher, version, results, phases)
            moved = frozenset(worker.worker_id for worker in in_traffic) | (source.workers or frozenset())
            with phases.during("load" if source.path is not None else "confirm"):
                outcomes = await asyncio.gather(
                    *(
                        self._update_one(w, version, source, staged, previous if w.worker_id in moved else None)
                        for w in targets
                    )
                )
            results.update({w.worker_id: outcome for w, outcome in zip(targets, outcomes, strict=True)})
            updated = [worker for worker in targets if results[worker.worker_id]["ok"]]
            odd = [worker for worker in in_traffic if not results[worker.worker_id]["ok"]]
            if updated:
                self._fleet.version = version
                self.on_updated(version)
                self._fleet.source = source
            self._take_out([worker for worker in active if not results[worker.worker_id]["ok"]], results)
        for worker in self._pool.workers.values():
            if worker.quarantine is not None and worker.quarantine.kind == "version":
                worker.refusals = 0
                worker.attention.set()
        self._pool.fleet_changed()
        ok = bool(updated) and not odd
        seconds = asyncio.get_running_loop().time() - started
        names = tuple(worker.worker_id for worker in odd)
        self._bus.emit(WeightsUpdated(version, source.kind, seconds, ok, names, phases.seconds))
        record = {"version": self._fleet.version, "workers": results}
        if not updated and not odd:
            raise NotNow("update_failed", "no worker is left to update", detail=record)
        if odd:
            message = f"version {version} did not reach {', '.join(names)}; the fleet is at {self._fleet.version}"
            raise NotNow("update_failed", message, detail=record)
        return record

    async def _stage(
        self,
        targets: list[Worker],
        publisher: Publisher,
        version: int,
        results: dict[str, dict[str, Any]],
        phases: Phases,
    ) -> Staged:
        """Hand every target the weights; where one cannot take them, none does, and all that can are as they were.

        Raises:
            NotNow: `update_failed`; only engines that load as it comes have changed, and they are out of traffic.
        """
        staged = await self._staging.stage(targets, publisher, version, phases)
        if not staged.failed:
            return staged
        for worker in targets:
            error = staged.failed.get(worker.worker_id, "another worker failed: the update ended here as well")
            if staged.touched(worker):
                self._spoil(worker, f"an update to version {version} ended half-way: {error}")
            results[worker.worker_id] = {"ok": False, "version": worker.version, "error": error}
        names = ", ".join(staged.failed)
        message = f"version {version} could not be handed to {names}; the fleet is at {self._fleet.version} as before"
        self._bus.emit(WeightsUpdated(version, publisher.way, 0.0, False, tuple(staged.failed), phases.seconds))
        record = {"version": self._fleet.version, "workers": results}
        raise NotNow("update_failed", message, detail=record)

    @staticmethod
    def _spoil(worker: Worker, reason: str) -> None:
        """Its weights are of no version: out of traffic until it has some, all of them, from one update."""
        worker.version, worker.half_loaded = None, True
        worker.put_in_quarantine("version", reason)

    async def _waiting_for_weights(self, source: Source) -> list[Worker]:
        """Workers that are out of traffic for their version alone, and answer: they are brought along.

        One with unlabelled weights can take new ones from disk as any other; to adopt weights it has to say which, or,
        where its kind of engine never does, whoever moved them has to name it.
        """
        waiting = [
            worker
            for worker in self._pool.workers.values()
            if worker.quarantine is not None and worker.quarantine.kind == "version" and not worker.calls
            if worker.refusal is None  # it is another engine than ours
            if not worker.weightless
        ]
        answers = await asyncio.gather(*(self._answers(worker) for worker in waiting))
        return [
            worker
            for worker, answered in zip(waiting, answers, strict=True)
            if answered and (source.moves or worker.version is not None or _is_named(worker, source))
        ]

    def _take_out(self, odd: list[Worker], results: dict[str, dict[str, Any]]) -> None:
        """Keep from traffic whoever does not report the fleet's version, or may still hold an older one's cache."""
        for worker in odd:
            unflushed = results[worker.worker_id].get("flushed") is False
            if worker.state is WorkerState.ACTIVE and (unflushed or worker.version != self._fleet.version):
                what = "its cache was not flushed" if unflushed else f"it reports {worker.version}"
                worker.put_in_quarantine(
                    "version", f"the update failed here; {what}, the fleet is at {self._fleet.version}"
                )

    async def _update_one(
        self, worker: Worker, version: int, source: Source, staged: Staged | None, previous: int | None
    ) -> dict[str, Any]:
        with _loading([worker]):
            return await self._bring(worker, version, source, staged, previous)

    async def _bring(
        self, worker: Worker, version: int, source: Source, staged: Staged | None, previous: int | None
    ) -> dict[str, Any]:
        try:
            if source.path is not None:
                await self._presence.during(worker, self._fleet.load(worker, source.path, version))
            elif staged is not None:
                await self._presence.during(worker, self._close(worker, staged, version))
            else:
                await self._presence.during(worker, self._adopt(worker, version, previous))
        except WorkerFailure as failure:
            if worker.state is WorkerState.ACTIVE:
                await self._ask(worker)
            else:
                worker.version = None  # nobody can say what it has; it is asked when it comes back
            cache = {"flushed": False} if failure.kind == _UNFLUSHED else {}
            if staged is not None and staged.touched(worker):
                self._spoil(worker, f"an update to version {version} ended half-way: {failure}")
            return {"ok": False, "version": worker.version, "error": str(failure), **cache}
        if worker.version != version:
            return {"ok": False, "version": worker.version, "error": f"it reports version {worker.version}"}
        if source.moves:
            worker.half_loaded = False
        if source.moves or worker.worker_id in (source.workers or ()):
            worker.weights_lost = False
        return {"ok": True, "version": version}

    async def _adopt(self, worker: Worker, version: int, previous: int | None) -> None:
        """`external`: the trainer moved the weights; the label is ours to check, and to set where it lags.

        Args:
            worker: whom to ask.
            version: what it should have.
            previous: the version whose label is set to the new one; None where the worker has to report it itself.
        """
        await self._fleet.read_label(worker)
        if previous is not None and previous != version and (worker.version == previous or not worker.labels):
            await self._fleet.set_label(worker, version)
        elif worker.version != version:
            known = "" if previous is None else f"{previous} nor "
            raise WorkerFailure("odd_version", f"it reports {worker.version}, not {known}{version}")
        await self._flush(worker, version)

    async def _close(self, worker: Worker, staged: Staged, version: int) -> None:
        """What it was handed becomes its weights."""
        await self._staging.close(worker, staged, version)
        await self._fleet.confirm(worker, version)
        await self._flush(worker, version)

    async def _flush(self, worker: Worker, version: int) -> None:
        """Have every prefix dropped that was made under other weights."""
        worker.flushed = None
        if worker.keeps_cache:
            return  # the cache of what is frozen there was asked to stay, and the engine flushes none or all
        try:
            await self._fleet.flush(worker)
        except WorkerFailure as failure:
            raise WorkerFailure(_UNFLUSHED, str(failure)) from failure
        worker.flushed = version

    async def _answers(self, worker: Worker) -> bool:
        try:
            await self._fleet.read_label(worker)
        except WorkerFailure:
            worker.version = None
            return False
        return True

    async def _ask(self, worker: Worker) -> None:
        """After a failure: which version does it say it has? Unknown where it does not answer."""
        worker.version = await self._fleet.ask(worker)


@contextmanager
def _loading(workers: Iterable[Worker]) -> Iterator[None]:
    """Weights are on their way to these: what is frozen there does not go on."""
    workers = list(workers)
    for worker in workers:
        worker.loading = True
    try:
        yield
    finally:
        for worker in workers:
            worker.loading = False


def _still(worker: Worker) -> bool:
    """Whether nothing of ours can make a token there: it is idle or frozen."""
    return not worker.calls or worker.frozen


def _is_named(worker: Worker, source: Source) -> bool:
    """Whether an engine that reports no versions was given the weights by the word of whoever moved them."""
    return not worker.labels and source.workers is not None and worker.worker_id in source.workers


def _was_given(worker: Worker, source: Source, since: float) -> bool:
    """Whether the trainer can have given this worker the weights: it said so, or found it in traffic."""
    if source.workers is not None:
        return worker.worker_id in source.workers
    return worker.active_since <= since
