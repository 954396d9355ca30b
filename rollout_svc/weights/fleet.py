"""Which weights the fleet has, and whether one worker has them too.

Invariants:

- `version` is a number engines reported or were labelled with by us; it is never a wish.
- A worker enters traffic only with the fleet's version, confirmed by the worker itself.
- A label that is no integer means the weights of the start: `initial_version`, and no other, may be set over it.
- Only an update from `disk` can be replayed to a worker that missed it; that of an earlier life as well, as long as its
  files are there. An engine that has newer weights than those is followed.
- No worker is admitted while an update is under way, nor on the strength of a version that has changed since.
- Nobody moves weights to a worker whose admission does: an update leaves it out, and its admission looks again after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from rollout_svc.engines import EngineInfo
from rollout_svc.engines.updates.protocol import Way
from rollout_svc.errors import WorkerFailure
from rollout_svc.weights.confirmation import Confirmation
from rollout_svc.weights.probe import Probe
from rollout_svc.weights.staging import Publisher
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker

__all__ = ["UNFLUSHED", "Fleet", "Source"]

UNFLUSHED: Final = "unflushed"
"""The kind of failure after which the label is right and the cache is not."""

_LABEL_S: Final = 10.0  # seconds for setting or reading a label


@dataclass(frozen=True, slots=True)
class Source:
    """Where an update came from.

    Attributes:
        path: of `disk`: what the engines load.
        workers: of `external`: whom the trainer says it gave the weights; None: everyone who was in traffic.
        publisher: of every other kind: who has the buckets, and how they travel.
        check_finite: of `disk`: NaN and infinity are refused before anything is stopped.
        probe: what engines with these weights generate, where the caller knows.
        check_names: of `disk`: other tensors than the weights before had are refused before anything is stopped.
    """

    kind: Literal["disk", "external"] | Way
    path: str | None = None
    workers: frozenset[str] | None = None
    publisher: Publisher | None = None
    check_finite: bool = False
    probe: Probe | None = None
    check_names: bool = True

    @property
    def moves(self) -> bool:
        """Whether it is us who give the engines the weights."""
        return self.kind != "external"

    def names(self, worker: Worker) -> bool:
        """Whether an engine that reports no versions was given the weights by the word of whoever moved them."""
        return not worker.labels and self.workers is not None and worker.worker_id in self.workers

    def reached(self, worker: Worker, since: float) -> bool:
        """Whether the trainer can have given this worker the weights: it said so, or found it in traffic at `since`."""
        if self.workers is not None:
            return worker.worker_id in self.workers
        return worker.active_since <= since


class Fleet:
    """The fleet's weight version, and admission to it.

    Attributes:
        bringing: ids of the workers that are being brought to it by their admission, and by nobody else meanwhile.
    """

    def __init__(
        self, *, control: Control, confirmation: Confirmation, initial_version: int, update_timeout_s: float
    ) -> None:
        self.confirmation = confirmation
        self.on_version: Callable[[int, str | None], None] = lambda *_: None
        self._version = initial_version
        self._initial_version = initial_version
        self.source: Source | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._control = control
        self._update_timeout_s = update_timeout_s
        self._anyone = False
        self._recalled = False
        self.bringing: set[str] = set()

    @property
    def version(self) -> int:
        """Trainer steps whose weights the fleet has."""
        return self._version

    def became(self, version: int, source: Source | None) -> None:
        """Follow what the engines have now, and where it came from; None: nobody knows."""
        self._version = version
        self.source = source
        self._recalled = False
        self.on_version(version, None if source is None or source.kind != "disk" else source.path)

    def recall(self, version: int, path: str) -> None:
        """Have engines brought to what the fleet had in an earlier life, before anything of this one is known."""
        self._version, self.source, self._recalled = version, Source("disk", path), True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold admissions back while an update decides what the fleet's version is."""
        self._settled.clear()
        try:
            yield
        finally:
            self._settled.set()

    async def admit(self, worker: Worker, info: EngineInfo, undisturbed: Callable[[], bool]) -> str | None:
        """Bring a worker to the fleet's version where that can be done.

        A worker that hangs while it loads holds up nobody else: no lock is held, the version is compared again after.

        Args:
            worker: whom to bring up.
            info: what it says of itself.
            undisturbed: false as soon as something came in between, and no weights may move there.

        Returns:
            None when the worker may get traffic in this very step, else why not.
        """
        if worker.labels:
            worker.version = info.weight_version
        while True:
            while not self._settled.is_set():  # the next update may have begun before this one's end was heard of
                await self._settled.wait()
            if not undisturbed():
                return "something came in between"
            self.bringing.add(worker.worker_id)
            try:
                kept_out = await self._bring_up(worker, info)
            except WorkerFailure as failure:
                return f"weights: {failure}"
            finally:
                self.bringing.discard(worker.worker_id)
            if kept_out is not None:
                return kept_out
            if self._settled.is_set() and self.version == worker.version:
                self._anyone = True
                return None

    async def _bring_up(self, worker: Worker, info: EngineInfo) -> str | None:
        """One try; None when the worker has what was the fleet's version at its start."""
        half_loaded = info.half_loaded or worker.half_loaded or worker.weights_lost
        if half_loaded and (self.source is None or self.source.path is None):
            what = "its weights were given up" if worker.weights_lost else "weights began to load there and never ended"
            return f"{what}, and there are none to load instead: restart it"
        if worker.contradiction is not None and (self.source is None or self.source.path is None):
            return worker.contradiction
        if (
            worker.version is None
            and self.source is None
            and self.version == self._initial_version
            and info.versions <= {self._initial_version}
        ):
            # A label that is no integer says nothing: no update has been made, so these are the initial weights.
            await self.set_label(worker, self._initial_version)
        if worker.version is not None and not self._anyone and self._follows(worker.version):
            self.became(worker.version, None)  # this service is younger than the engines it found
        target = self.version
        if worker.version == target and not half_loaded and worker.contradiction is None:
            if worker.flushed != target and self.source is not None:
                await self.flush(worker)
                worker.flushed = target
            return None
        if self.source is None or self.source.path is None:
            has = info if worker.version is None else f"version {worker.version}"
            return f"it has {has}, the fleet is at version {target}, and that cannot be replayed"
        if worker.calls:
            return "it still runs requests; weights are loaded when it is idle"
        await self.load(worker, self.source.path, target)
        if worker.version != target:
            return f"it reports version {worker.version} after being brought to {target}"
        await self.confirmation.confirm(worker, target, self.source.probe)
        return None

    def _follows(self, version: int) -> bool:
        """Whether the first engine's word counts more than what is known here."""
        return self.source is None or (self._recalled and version > self._version)

    async def ask(self, worker: Worker) -> int | None:
        """Which version does it say it has? None where it does not say, or does not answer."""
        return (await self.look(worker)).weight_version

    async def look(self, worker: Worker) -> EngineInfo:
        """What does it say of its weights? Nothing where it does not answer."""
        try:
            return await self._control.info(worker, _LABEL_S)
        except WorkerFailure:
            return EngineInfo(None)

    async def load(
        self, worker: Worker, path: str, version: int, loaded: Callable[[Worker], None] = lambda _: None
    ) -> None:
        """Load weights from a path and have the engine confirm the label; raises WorkerFailure.

        Args:
            worker: whose engine loads.
            path: what it loads.
            version: the label.
            loaded: told when it has the weights, before caches are flushed and the label is read.
        """
        if "disk" not in worker.capabilities:
            raise WorkerFailure("cannot", f"{worker.dialect.name} loads no weights from disk")
        calls = worker.dialect.update_from_disk(path, version, flush=not worker.keeps_cache)
        if worker.half_loaded or (worker.version is None and (await self._control.info(worker, _LABEL_S)).half_loaded):
            await self._forget_load(worker, version)
        keeps, worker.flushed = worker.keeps_cache, None
        try:
            flush = worker.dialect.flush_cache()
            at = calls.index(flush[0]) if flush and flush[0] in calls else len(calls)
            await self._control.do(worker, calls[:at], self._update_timeout_s)
            loaded(worker)
            await self._control.do(worker, calls[at:], self._update_timeout_s)
        except WorkerFailure as failure:
            if not failure.lingers:  # one that is at it still is asked when it is to load again
                await self._forget_load(worker, version)
            raise
        worker.flushed = None if keeps else version
        await self.confirm(worker, version)
        worker.half_loaded = worker.weights_lost = False

    async def _forget_load(self, worker: Worker, version: int) -> None:
        """Have a load that failed not count into the next one, where that can be done."""
        for place, call in enumerate(worker.dialect.forget_load(version)):
            try:
                await self._control.do(worker, [call], _LABEL_S)
            except WorkerFailure:
                if place == 0:
                    return
            worker.half_loaded = True

    async def set_label(self, worker: Worker, version: int) -> None:
        """Label the weights that are loaded and have the engine confirm; raises WorkerFailure."""
        await self._control.do(worker, worker.dialect.set_version(version), _LABEL_S)
        await self.confirm(worker, version)

    async def flush(self, worker: Worker) -> None:
        """Drop every cached prefix; raises WorkerFailure."""
        await self._control.do(worker, worker.dialect.flush_cache(), _LABEL_S)

    async def drop_caches(self, worker: Worker, version: int) -> None:
        """Have every prefix dropped that was made under other weights; raises WorkerFailure of the kind UNFLUSHED."""
        worker.flushed = None
        if worker.keeps_cache:
            return  # the cache of what is frozen there was asked to stay, and the engine flushes none or all
        try:
            await self.flush(worker)
        except WorkerFailure as failure:
            raise WorkerFailure(UNFLUSHED, str(failure)) from failure
        worker.flushed = version

    async def confirm(self, worker: Worker, version: int) -> None:
        """Believe the engine, and ourselves only where it has no label to read."""
        if worker.labels:
            await self.read_label(worker)
        else:
            worker.version = version

    async def read_label(self, worker: Worker) -> None:
        """Ask the engine which version it has; one without labels has what we gave it. Raises WorkerFailure."""
        info = await self._control.info(worker, _LABEL_S)
        if worker.labels:
            worker.version = info.weight_version
        elif info.process != worker.process:  # whoever moves weights may have given them to the one before
            raise WorkerFailure("restarted", "it is another process than was let in, and reports no weight version")
