"""The update protocol: all workers or none in name, confirmed by the engines.

Invariants:

- No weights move to a worker that runs a request of ours, unless it is frozen with it, is quarantined for one, or is
  not there.
- Only a worker in traffic can fail an update: one that is out already is brought along where it answers, else listed.
- After an update every worker in traffic reports the version, or it is named in the answer and out of traffic. One that
  was out and has the weights now is in traffic when the answer is given, where it answers its supervisor in time.
- A failure at some of them is an error, and the caller's pause stays; only where the others are to go on it is an
  answer, with `ok: false` for each of them.
- An engine that was told to load and did not answer has weights of no version, whatever it reports: they may arrive.

What becomes of those that did not fail, where some in traffic did (`weights.on_failure`):

| `stop` | they have the new weights, and the fleet is at that version |
| `rollback` | they go back: the fleet is at the version before; who cannot is out (`taking_back.py`) |
| `quarantine` | they have the new weights and go on; whoever failed gets them before it sees traffic again |

Weights that a trainer moved itself cannot be taken back: `rollback` is `stop` then. One that failed everywhere has
changed nothing that is in traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from rollout_svc.errors import NotNow, WorkerFailure
from rollout_svc.events import EngineDoubted, EventBus, WeightsUpdated
from rollout_svc.weights.fleet import UNFLUSHED, Fleet, Source
from rollout_svc.weights.loading import loading, still
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.presence import Presence
from rollout_svc.weights.progress import telling
from rollout_svc.weights.results import Results, why
from rollout_svc.weights.staging import Staged, Staging
from rollout_svc.weights.taking_back import Before, TakingBack
from rollout_svc.workers.pool import WorkerPool
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["OnFailure", "WeightUpdater"]

OnFailure = Literal["stop", "rollback", "quarantine"]


class WeightUpdater:
    """Carries one update to every worker that can take it.

    Attributes:
        phases: of the update under way, or the last one; None before the first.
        on_half_loaded: told of each worker whose weights are of no version after an update, once it is out of traffic.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        pool: WorkerPool,
        bus: EventBus,
        presence: Presence,
        staging: Staging,
        on_failure: OnFailure,
    ) -> None:
        self.on_updated: Callable[[int], None] = lambda _: None
        self.on_half_loaded: Callable[[Worker], None] = lambda _: None
        self.phases: Phases | None = None
        self._presence = presence
        self._staging = staging
        self._on_failure = on_failure
        self._doubted: set[str] = set()
        self._taking_back = TakingBack(fleet, staging)
        self._fleet = fleet
        self._pool = pool
        self._bus = bus

    def refuse_unable(self, source: Source) -> None:
        """Raise NotNow where workers in traffic cannot take weights this way, and the update would fail for it."""
        way = source.kind
        active = [worker for worker in self._pool.workers.values() if worker.state is WorkerState.ACTIVE]
        unable = [worker for worker in active if source.moves and way not in worker.capabilities]
        if not unable or (self._on_failure == "quarantine" and len(unable) < len(active)):
            return
        results: Results = {}
        for worker in unable:
            error = f"cannot: {worker.dialect.name} takes no weights by {way} here"
            results[worker.worker_id] = {"ok": False, "version": worker.version, "error": error}
        record = {"version": self._fleet.version, "workers": results}
        raise NotNow("update_failed", f"nothing was stopped: {why(results, results)}", detail=record)

    def telling(self, version: int, source: Source, phases: Phases) -> AbstractContextManager[None]:
        """Tell how far an update is, and how it ended; the body is all of it, the pause around it too."""
        self.phases = phases
        return telling(self._bus, version, source.kind, phases)

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
        started = asyncio.get_running_loop().time()
        active = [w for w in self._pool.workers.values() if w.state is WorkerState.ACTIVE and still(w)]
        # From the look on: a stronger pause may join while the others are asked, and what is frozen must stay so.
        with self._fleet.updating(), loading(active):
            in_traffic = [worker for worker in active if source.moves or source.reached(worker, since)]
            targets = active + await self._waiting_for_weights(source)
            results: Results = {
                worker.worker_id: {"ok": False, "skipped": f"{worker.state}: {worker.reason}"}
                for worker in self._pool.workers.values()
                if worker not in targets
            }
            for name in sorted((source.workers or frozenset()) - self._pool.workers.keys()):
                results[name] = {"ok": False, "skipped": "there is no such worker"}
            before = Before(self._fleet.version, self._fleet.source)
            moved = frozenset(worker.worker_id for worker in in_traffic) | (source.workers or frozenset())
            needed = {worker.worker_id for worker in active if self._on_failure != "quarantine"}
            staged = await self._stage(targets, needed, source, version, results, phases)
            if staged is None or staged.whole:
                lag = dict.fromkeys(moved, before.version)
                await self._hand(targets, version, source, staged, lag, results, phases)
                await self._fleet.confirmation.confirm_all(targets, version, source.probe, results, phases)
            updated = [worker for worker in targets if results[worker.worker_id]["ok"]]
            odd = [worker for worker in in_traffic if not results[worker.worker_id]["ok"]]
            if updated and version == before.version and source.moves:
                for worker in odd:  # it reports that version in any case
                    self._spoil(worker, f"other weights of version {version} did not arrive here")
            if updated and odd and self._on_failure == "rollback" and source.moves:
                await self._take_back(targets, before, staged, results)
            elif updated:
                self._fleet.became(version, source)
                self.on_updated(version)
            self._take_out([worker for worker in active if not results[worker.worker_id]["ok"]], results)
        self._look_again(targets)
        self._doubt(updated)
        await self._presence.returned([worker for worker in updated if results[worker.worker_id]["ok"]], phases)
        seconds = asyncio.get_running_loop().time() - started
        at_fault = odd if staged is None or staged.whole else [w for w in odd if w.worker_id in staged.failed]
        names = tuple(worker.worker_id for worker in at_fault)
        self._bus.emit(WeightsUpdated(version, source.kind, seconds, bool(updated) and not odd, names, phases.seconds))
        return self._answer(version, bool(updated), names if odd else None, results, phases)

    def _answer(
        self, version: int, updated: bool, odd: tuple[str, ...] | None, results: Results, phases: Phases
    ) -> dict[str, Any]:
        """The record, or an error that has it; `odd`: those at fault where not everybody has the weights."""
        record = {"version": self._fleet.version, "workers": results}
        if not updated and odd is None:
            raise NotNow(
                "update_failed",
                f"no worker is left to update: {why(results, results) or 'there is none'}",
                detail=record,
            )
        if odd is not None:
            fleet = f"the fleet is at {self._fleet.version}"
            phases.error = f"version {version} did not reach {', '.join(odd)}; {fleet}: {why(odd, results)}"
            if not (updated and self._on_failure == "quarantine"):
                raise NotNow("update_failed", phases.error, detail=record)
        return record

    async def _hand(
        self,
        targets: list[Worker],
        version: int,
        source: Source,
        staged: Staged | None,
        lag: Mapping[str, int],
        results: Results,
        phases: Phases,
    ) -> None:
        """Have everybody take the weights who has no result yet; `lag`: the label that is set to the new one, by id."""
        handed = [worker for worker in targets if worker.worker_id not in results]
        under_way = set(handed)
        with loading(handed), phases.during("load" if source.path is not None else "confirm") as turn:

            def loaded(worker: Worker) -> None:
                under_way.discard(worker)
                if not under_way:
                    turn("confirm")

            outcomes = await asyncio.gather(
                *(self._bring(w, version, source, staged, lag.get(w.worker_id), loaded) for w in handed)
            )
        results.update({w.worker_id: outcome for w, outcome in zip(handed, outcomes, strict=True)})

    async def _stage(
        self,
        targets: list[Worker],
        needed: Collection[str],
        source: Source,
        version: int,
        results: Results,
        phases: Phases,
    ) -> Staged | None:
        """Hand every target the weights of a publisher; who cannot take them has its result, all where a needed one.

        Engines that load as it comes have changed where it ended, and are out of traffic then.
        """
        if source.publisher is None:
            return None
        staged = await self._staging.stage(targets, source.publisher, version, phases, needed=needed)
        for worker in targets:
            if staged.whole and worker.worker_id not in staged.failed:
                continue
            error = staged.failed.get(worker.worker_id, "another worker failed: the update ended here as well")
            if staged.touched(worker):
                self._spoil(worker, f"an update to version {version} ended half-way: {error}")
            results[worker.worker_id] = {"ok": False, "version": worker.version, "error": error}
        return staged

    async def _take_back(self, targets: list[Worker], before: Before, staged: Staged | None, results: Results) -> None:
        """Bring everybody back who is not at the version before any more; results say who is, and who cannot."""

        async def one(worker: Worker) -> None:
            result = results[worker.worker_id]
            kept = worker.version == before.version and not worker.half_loaded
            if not result["ok"] and (kept or worker.state is not WorkerState.ACTIVE):
                return  # it is where it was, or out: whoever looks after it brings it up
            closed = staged if result["ok"] else None
            with loading([worker]):
                try:
                    back = self._taking_back.bring(worker, before, closed)
                    await self._presence.during(worker, back)
                except WorkerFailure as failure:
                    await self._ask(worker)
                    why = f"it could not be taken back: {failure}"
                    if worker.version == before.version:  # by its label alone
                        self._spoil(worker, why)
                else:
                    worker.half_loaded = False
                    why = "it was taken back"
            said = result.get("error", "another worker failed")
            results[worker.worker_id] = {"ok": False, "version": worker.version, "error": f"{said}; {why}"}

        await asyncio.gather(*(one(worker) for worker in targets))

    def _doubt(self, updated: list[Worker]) -> None:
        """Say once of each engine that it cannot be told to drop what it cached."""
        for worker in updated:
            if not worker.dialect.flush_cache() and worker.worker_id not in self._doubted:
                self._doubted.add(worker.worker_id)
                what = f"{worker.dialect.name} cannot be told to drop cached prefixes, and new weights do not: it must"
                self._bus.emit(EngineDoubted(f"workers.{worker.worker_id[1:]}", f"{what} run without prefix caching"))

    def _look_again(self, targets: list[Worker]) -> None:
        """Have everybody looked at who waits for weights, and whoever has none restarted."""
        for worker in self._pool.workers.values():
            if worker.quarantine is not None and worker.quarantine.kind == "version":
                worker.refusals = 0
                worker.attention.set()
        for worker in targets:
            if worker.half_loaded:
                self.on_half_loaded(worker)
        self._pool.fleet_changed()

    @staticmethod
    def _spoil(worker: Worker, reason: str) -> None:
        """Its weights are of no version: out of traffic until it has some, all of them, from one update."""
        worker.version, worker.half_loaded = None, True
        # Any other is out, and looked at before it is let in.
        if worker.state in (WorkerState.ACTIVE, WorkerState.QUARANTINED):
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
            if not worker.weightless and worker.worker_id not in self._fleet.confirmation.asking | self._fleet.bringing
        ]
        answers = await asyncio.gather(*(self._answers(worker) for worker in waiting))
        return [
            worker
            for worker, answered in zip(waiting, answers, strict=True)
            if answered and (source.moves or worker.version is not None or source.names(worker))
        ]

    def _take_out(self, odd: list[Worker], results: dict[str, dict[str, Any]]) -> None:
        """Keep from traffic whoever does not report the fleet's version, or may still hold an older one's cache."""
        for worker in odd:
            unflushed = results[worker.worker_id].get("flushed") is False
            if worker.state is WorkerState.ACTIVE and (unflushed or worker.version != self._fleet.version):
                what = "its cache was not flushed" if unflushed else f"it reports {worker.version}"
                what = "weights began to load there and never ended" if worker.half_loaded else what
                worker.put_in_quarantine(
                    "version", f"the update failed here; {what}, the fleet is at {self._fleet.version}"
                )

    async def _bring(
        self,
        worker: Worker,
        version: int,
        source: Source,
        staged: Staged | None,
        previous: int | None,
        loaded: Callable[[Worker], None],
    ) -> dict[str, Any]:
        worker.flushed = None
        try:
            if source.path is not None:
                await self._presence.during(worker, self._fleet.load(worker, source.path, version, loaded))
            elif staged is not None:
                await self._presence.during(worker, self._close(worker, staged, version))
            else:
                await self._presence.during(worker, self._adopt(worker, version, previous))
        except WorkerFailure as failure:
            loaded(worker)  # or never will
            if worker.state is WorkerState.ACTIVE:
                await self._ask(worker)
            else:
                worker.version = None  # nobody can say what it has; it is asked when it comes back
            done = worker.version == version and worker.flushed == version  # only its label could not be read at first
            if not done:
                return self._failed(worker, version, source, staged, failure)
        if worker.version != version:
            return {"ok": False, "version": worker.version, "error": f"it reports version {worker.version}"}
        if source.moves:
            worker.half_loaded = False
        if source.moves or worker.worker_id in (source.workers or ()):
            worker.weights_lost = False
        return {"ok": True, "version": version}

    def _failed(
        self, worker: Worker, version: int, source: Source, staged: Staged | None, failure: WorkerFailure
    ) -> dict[str, Any]:
        """Say what became of a worker that did not take an update; out of traffic where what it says is no proof."""
        unflushed = worker.version == version and worker.flushed != version and not worker.keeps_cache
        if staged is not None and staged.touched(worker):
            self._spoil(worker, f"an update to version {version} ended half-way: {failure}")
        elif source.moves and failure.lingers and (worker.version != version or version == self._fleet.version):
            self._spoil(worker, f"weights of version {version} may still be loaded there: {failure}")
        cache = {"flushed": False} if unflushed or failure.kind == UNFLUSHED else {}
        return {"ok": False, "version": worker.version, "error": str(failure), **cache}

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
        await self._fleet.drop_caches(worker, version)

    async def _close(self, worker: Worker, staged: Staged, version: int) -> None:
        """What it was handed becomes its weights."""
        await self._staging.close(worker, staged, version)
        await self._fleet.confirm(worker, version)
        await self._fleet.drop_caches(worker, version)

    async def _answers(self, worker: Worker) -> bool:
        try:
            await self._fleet.read_label(worker)
        except WorkerFailure:
            worker.version = None
            return False
        return True

    async def _ask(self, worker: Worker) -> None:
        """After a failure: which version does it say it has? Unknown where it does not answer."""
        info = await self._fleet.look(worker)
        worker.version = info.weight_version
        if info.half_loaded:
            worker.half_loaded = True
