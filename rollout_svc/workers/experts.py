"""Routed experts of an answer: decoded, joined with what their sample has, and stored, off the loop.

Invariants:

- They are asked for where the configuration, the request's sampling and the lane say so: never for an evaluation.
- They are part of the answer: until they are stored it has not come, and whoever ends the call loses all of it.
- What comes when nobody waits any more is released as it comes; a key that nobody will decode is fetched all the same,
  for whoever keeps what it names waits for that.
- What a sample had is untouched until its new history is whole: it is the sample that gives the old one up.
- Once closed, nothing is stored any more, and what was under way has been released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rollout_svc.config import ExpertsConfig
from rollout_svc.engines import Completion, GenerateRequest
from rollout_svc.engines.lmdeploy_keys import ExpertKeys
from rollout_svc.errors import Interrupted, RolloutError, SampleFailure, SpentHandle
from rollout_svc.events import EventBus
from rollout_svc.gate import Lane
from rollout_svc.heavy import Heavy
from rollout_svc.sample import Sample
from rollout_svc.tasks import TaskOwner, wait_until
from rollout_svc.tensors import Handle, Handles, Store, Threads
from rollout_svc.tensors.experts import Layout, RawExperts, decode
from rollout_svc.tensors.layouts import configured, filled
from rollout_svc.workers.withdrawal import withdraw
from rollout_svc.workers.worker import Worker

__all__ = ["KIND", "ExpertsDesk", "Fetch"]

KIND: Final = "experts"
"""Kind of their handles; and an engine's capability."""
_CLOSE_S: Final = 5.0  # seconds for what is being decoded when the service stops: far longer than the largest takes

Fetch = Callable[[str], Awaitable[Any]]
"""Fetches what a key names, once, as an array `(rows, layers, top_k)`; SampleFailure `experts_missing` where nothing is
there. It bounds itself."""


class ExpertsDesk:
    """Makes handles of what engines send; see the module's invariants.

    Attributes:
        max_bytes: most of one answer's.
        store: where they are put.
        fetch: resolves keys.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        handles: Handles,
        store: Store,
        threads: Threads,
        tasks: TaskOwner,
        bus: EventBus,
    ) -> None:
        self.enabled = config.enabled
        self.max_bytes = config.max_bytes
        self.store = store
        self.fetch: Fetch = ExpertKeys(config.ray_address).fetch
        self._configured = configured(config)
        self._bus = bus
        self._handles = handles
        self._threads = threads
        self._tasks = tasks
        self._closed = False
        self._results: set[asyncio.Future[Handle | None]] = set()

    def __repr__(self) -> str:
        return f"<ExpertsDesk enabled={self.enabled} under way={len(self._results)}>"

    @property
    def results(self) -> frozenset[asyncio.Future[Handle | None]]:
        """What is under way, and what has come and was not taken over yet."""
        return frozenset(self._results)

    def rows_held(self, sample: Sample, lane: Lane, *, asked: bool) -> int | None:
        """The first row a call has to ask for: as many as its sample has; None where it asks for none.

        Args:
            sample: whose call it is.
            lane: the call's.
            asked: what its sampling says.
        """
        if not (self.enabled and asked and lane == "train"):
            return None
        return 0 if sample.experts is None else sample.experts.shape[0]

    async def read(
        self,
        worker: Worker,
        sample: Sample,
        request: GenerateRequest,
        sent: int,
        raw: RawExperts | None,
        answer: Callable[[], Completion],
    ) -> Completion:
        """Read an answer to a call that asked for them; `experts` of it is the caller's to keep or to release.

        One that its engine or a pause cut short may come without (SGLang forgets them where it takes a request back):
        its tokens count, and the next call asks for the rows that are missing.

        Args:
            worker: who answered.
            sample: whose call it is.
            request: what was asked.
            sent: tokens the engine was given.
            raw: what it sent of routed experts.
            answer: reads and checks the rest.

        Raises:
            SampleFailure: `experts_missing`, `experts_invalid`, `experts_not_stored`, or what `answer` raises.
            WorkerFailure: what `answer` raises.
            Interrupted: the sample's history went meanwhile, or the service stops.
        """
        try:
            completion = answer()
        except RolloutError:
            self.drop(raw)
            raise
        if not completion.ids:
            self.drop(raw)
        elif raw is not None:
            completion.experts = await self._unpacked(worker, sample, request, raw, sent, completion)
        elif not may_lack(completion, request):
            withdraw(worker, KIND, "returned no routed experts although they were asked for", self._bus)
            raise SampleFailure("experts_missing", f"{worker.worker_id} answered without its routed experts")
        return completion

    async def _unpacked(
        self,
        worker: Worker,
        sample: Sample,
        request: GenerateRequest,
        raw: RawExperts,
        sent: int,
        completion: Completion,
    ) -> Handle:
        if raw.form == "key":
            raw = raw._replace(form="array", data=await self._fetched(str(raw.data)))
        if self._closed:
            raise Interrupted(f"{sample.sample_id}: the service has stopped")
        job = _Job(
            desk=self,
            holder=sample.sample_id,
            raw=raw,
            layout=filled(self._configured, None if worker.profile is None else worker.profile.experts),
            tokens=sent + len(completion.ids),
            held=request.experts_from or 0,
            stopped=completion.finish_reason == "stop",
            old=sample.experts,
        )
        return await self._done(job)

    async def _done(self, job: _Job) -> Handle:
        """Wait for a job; whoever is cancelled here leaves it to itself."""
        result = self._threads.submit(job.run)
        self._results.add(result)
        try:
            handle = await asyncio.shield(result)
        except asyncio.CancelledError:
            job.unwanted = True
            result.add_done_callback(self._let_go)
            raise
        except BaseException:
            self._results.discard(result)
            raise
        self._results.discard(result)
        if handle is None:
            raise Interrupted(f"{job.holder}: nobody waited for its routed experts")
        return handle

    def _let_go(self, result: asyncio.Future[Handle | None]) -> None:
        """Release what came for nobody."""
        self._results.discard(result)
        if result.cancelled() or result.exception() is not None:
            return
        handle = result.result()
        if handle is not None:
            handle.release("nobody: its call had ended")

    # -- keys ------------------------------------------------------------------------------------------------

    async def _fetched(self, key: str) -> Any:
        """What a key names; it is fetched to the end whoever leaves, for it can be only once."""
        return await asyncio.shield(self._fetching(key))

    def _fetching(self, key: str) -> asyncio.Task[Any]:
        async def fetch() -> Any:
            return await self.fetch(key)

        task = self._tasks.spawn(f"experts:{key[:16]}", fetch(), handled=True)
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return task

    def drop(self, raw: RawExperts | None) -> None:
        """Nobody will decode this: what is kept for whoever fetches it is fetched."""
        if raw is not None and raw.form == "key" and not self._closed:
            self._fetching(str(raw.data))

    # -- the end ---------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what is under way, release what came of it, and close the store; idempotent."""
        self._closed = True
        await self._threads.close()
        await wait_until(self._results, asyncio.get_running_loop().time() + _CLOSE_S)
        for result in tuple(self._results):
            result.add_done_callback(self._let_go)
        await asyncio.sleep(0)
        self.store.close()


def may_lack(completion: Completion, request: GenerateRequest) -> bool:
    """Whether an answer counts without the rows it was asked for: it is gone on with, and they come then."""
    return completion.finish_reason == "abort" and len(completion.ids) < request.max_tokens


def release(completion: Completion, by: str) -> None:
    """Give up what an answer owns that does not count."""
    if completion.experts is not None:
        completion.experts.release(by)
        completion.experts = None


@dataclass(slots=True)
class _Job:
    """One answer's rows, from what an engine sent to a handle; done in a thread.

    Attributes:
        unwanted: nobody waits for it: what has not begun is left.
    """

    desk: ExpertsDesk
    holder: str
    raw: RawExperts
    layout: Layout
    tokens: int
    held: int
    stopped: bool
    old: Heavy | None
    unwanted: bool = False

    def run(self) -> Handle | None:
        """Decode, join, store; the handle's owner is whoever gets it."""
        if self.unwanted:
            return None
        rows = decode(self.raw, self.layout, tokens=self.tokens, held=self.held, stopped=self.stopped)
        joined = rows if self.old is None else self._joined(self.old, rows)
        try:
            stored = self.desk.store.put(joined)
        except Exception as error:
            raise SampleFailure("experts_not_stored", f"{type(error).__name__}: {error}") from error
        return self.desk._handles.hold(stored, kind=KIND, holder=self.holder)  # noqa: SLF001 - the desk's own job

    def _joined(self, old: Heavy, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows the sample has as they are, and the new ones behind them."""
        try:
            before = old.read()
        except SpentHandle as error:
            raise Interrupted(f"{self.holder}: its history went meanwhile: {error}") from error
        if before.shape[1:] != rows.shape[1:] or before.dtype != rows.dtype or len(before) != self.held:
            new = f"{rows.dtype} {rows.shape} from row {self.held} on"
            raise SampleFailure("experts_invalid", f"routed experts: {new}, after {before.dtype} {before.shape}")
        return np.concatenate((before, rows))
