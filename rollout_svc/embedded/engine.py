"""The engine as the event loop sees it: requests in flight, the door, the thread, and what control does to them.

Invariants:
- A request id is in flight at most once.
- An abort reaches what is in the scheduler when it is asked for, and nothing that comes later. At the door it is lost,
  as in SGLang: a request that waits out a pause there runs afterwards, and if the abort named it, no later abort by id
  reaches it; only `abort_all` does, once it is in.
- Weights change when nothing runs, or what runs is frozen; a change that fails leaves weights and label as they were.
- Of two pauses the later one holds: `abort` ends what another had frozen, `retract` frees the rows that `in_place` had
  kept, and `in_place` keeps what `retract` had put in the queue there. One `resume` ends them all.
- Memory is given up and taken back between two steps, never while weights change.
- A cancelled caller leaves nothing behind: its request is aborted, a change of weights it began still completes.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, get_args

from rollout_svc.embedded.door import Door
from rollout_svc.embedded.groups import Groups, Received, detached
from rollout_svc.embedded.job import Outcome
from rollout_svc.embedded.memory import Memory
from rollout_svc.embedded.model import WeightsError, read_weights, write_weights
from rollout_svc.embedded.owned import OwnedWork
from rollout_svc.embedded.receiving import BucketError
from rollout_svc.embedded.runner import EngineDiedError, EngineThread
from rollout_svc.embedded.updating import Updating
from rollout_svc.embedded.wire import invalid

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
    from typing import Any

    from rollout_svc.embedded.job import Job
    from rollout_svc.embedded.memory import Tag
    from rollout_svc.embedded.scheduler import Scheduler

PauseMode = Literal["abort", "retract", "in_place"]

PAUSE_MODES: Final[tuple[PauseMode, ...]] = get_args(PauseMode)


class Engine:
    """Runs requests on a scheduler's thread. Made, and used, in one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.door = Door()
        self.thread = EngineThread(scheduler)
        self._scheduler = scheduler
        self._in_flight: set[str] = set()
        self._abort_sent: set[str] = set()
        self._owned = OwnedWork()
        self._closing = False
        self._updating = Updating(scheduler.model)
        self._memory = Memory(scheduler)
        self._staging = asyncio.Lock()
        self._groups = Groups()
        self._named: str | None = None  # the label that came with a bucket of the update under way
        self._pauses = 0
        self._resumed = 0  # pauses before this one are over

    def __repr__(self) -> str:
        return f"<Engine in_flight={len(self._in_flight)} {self.door!r} {self.thread!r}>"

    @property
    def version(self) -> str:
        """The label of the weights."""
        return self._scheduler.version

    @property
    def staging_bytes(self) -> int:
        """Bytes that were ever allocated for weights to come."""
        return self._updating.allocated

    @property
    def released(self) -> frozenset[str]:
        """What of its memory is given up."""
        return self._scheduler.released

    @property
    def running(self) -> int:
        """Requests in the batch, frozen ones included."""
        return len(self._scheduler.batch.jobs)

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch: queued, retracted, or at the door."""
        return len(self._in_flight) - min(self.running, len(self._in_flight))

    @property
    def busy(self) -> bool:
        """Whether the cache is in use: requests are running, or queued while nothing freezes them there."""
        return self.running > 0 or (self.door.inside > 0 and not self.door.frozen)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    async def generate(self, job: Job) -> Outcome:
        """Run a request to its end, waiting at the door while it is closed.

        Raises:
            RefusedError: A request with this id is in flight.
            EngineDiedError: The engine has ended.
        """
        with self._admitted(job):
            if not await self.door.enter(job.rid):
                return self._turned_away(job)
            with self._inside(job) as future:
                return await future

    async def stream(self, job: Job) -> AsyncGenerator[Outcome | None]:
        """Run a request as `generate` does, with a None whenever it may have more tokens, and the outcome at the end.

        Raises:
            RefusedError: A request with this id is in flight; nothing was yielded.
            EngineDiedError: The engine has ended.
        """
        with self._admitted(job):
            if not await self.door.enter(job.rid):
                yield self._turned_away(job)
                return
            with self._inside(job) as future, self.thread.watched(future) as news:
                while not future.done():
                    await news.wait()
                    news.clear()
                    if not future.done():
                        yield None
                yield await future

    def abort(self, rid: str) -> None:
        """Abort every request in the scheduler whose id begins with `rid`, if one in flight is named exactly so.

        A second abort of the same id does nothing, not even when the first one was lost at the door.
        """
        if rid in self._in_flight and rid not in self._abort_sent:
            self._abort_sent.add(rid)
            self._abort_jobs(lambda job: job.rid.startswith(rid))

    def abort_all(self) -> None:
        """Abort everything in the scheduler."""
        self._abort_jobs(lambda _: True, urgent=True)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the door until `resume`, and stop what is inside. Idempotent.

        Args:
            mode: `abort` ends it, and is done when all of it has been answered. `in_place` takes no further step: rows
                keep what they hold, and an abort of what runs takes effect at the resume. `retract` puts what runs
                back in the queue with its tokens, to be computed anew from there, and takes aborts at once.

        Raises:
            EngineDiedError: The engine has ended.
        """
        scheduler = self._scheduler

        def end() -> None:
            scheduler.end(lambda _: True)
            scheduler.thaw()

        self.door.pause(frozen=mode != "abort")
        self._pauses += 1
        stop = {"abort": end, "in_place": scheduler.freeze, "retract": scheduler.retract}[mode]
        await self.thread.call(stop, urgent=True)
        if mode == "abort":
            await self.door.emptied()

    async def resume(self) -> None:
        """Let what is frozen go on, and open the door; done when the first has come about. Idempotent.

        Raises:
            EngineDiedError: The engine has ended.
        """
        self.door.resume()
        pauses = self._pauses
        if self._resumed < pauses:  # else it would wait for a step, for nothing
            await self.thread.call(self._scheduler.thaw)
            self._resumed = max(self._resumed, pauses)

    async def load(self, path: str, version: str | None, *, abort_running: bool) -> None:
        """Replace the weights by those of a file, and their label if one is given.

        Waits until nothing runs, holding back what comes meanwhile; while what runs is frozen, does not wait. What was
        frozen in its row goes on with the keys and values of the old weights, what was retracted has new ones.

        Args:
            path: A safetensors file, or a directory holding `model.safetensors`.
            version: The new label; None keeps the old one.
            abort_running: Abort what is queued or running rather than wait for it.

        Raises:
            WeightsError: The file does not fit; nothing has changed, and nothing was aborted.
            EngineDiedError: The engine has ended.
        """
        await self._owned.complete(self._load(path, version, abort_running=abort_running))

    async def begin_update(self, manifest: Any, *, finite: bool, update: str | None = None) -> None:
        """Begin an update in buckets; see `Updating.begin`. Requests run on."""
        async with self._staging:
            self._check_weights()
            self._updating.begin(manifest, finite=finite, update=update)
            self._named = None

    async def receive_bucket(self, call: Mapping[str, Any]) -> int:
        """Stage a bucket beside the weights, in a thread; see `Updating.receive`. Requests run on."""
        return await self._owned.complete(self._receive_bucket(call))

    async def join_group(self, call: Mapping[str, Any]) -> None:
        """Join the group of a trainer; see `Groups.join`. Requests run on."""
        await detached("group-join", lambda: self._groups.join(call))

    async def leave_group(self, name: str) -> None:
        """Leave one; raises BucketError where it is in none of this name."""
        await detached("group-leave", lambda: self._groups.leave(name))

    async def receive_broadcast(self, call: Mapping[str, Any], version: str | None) -> int:
        """Receive a bucket in a group, in a thread, and stage it; see `Groups.receive`. Requests run on.

        Args:
            call: As it came.
            version: The label of the weights when they are all there; None: nothing is said of it.

        Raises:
            BucketError: It did not come, or its update is over.
            WeightsError: A tensor does not fit the model, or is not finite where that was asked for.
        """
        begun = self._updating.begun
        if not self._updating.open:
            raise BucketError("no update was begun here")
        # Not under the lock: whoever ends the update, or begins another, does not wait for a trainer that hangs.
        received = await detached("group-receive", lambda: self._groups.receive(call))
        return await self._owned.complete(self._stage_broadcast(received, begun, version))

    async def end_update(self, version: str | None, update: str | None = None) -> None:
        """Swap what was staged in, and label it, where nothing runs or what runs is frozen; see `Updating.finish`.

        Raises:
            WeightsError: Tensors are missing; nothing has changed.
            BucketError: No update of this name is open.
            EngineDiedError: The engine has ended.
        """
        await self._owned.complete(self._end_update(version, update))

    async def revert_update(self, version: str | None, update: str | None = None) -> None:
        """Swap the weights before the last update in again, and label them; see `Updating.revert`.

        Raises:
            BucketError: They are not there any more; nothing has changed.
            EngineDiedError: The engine has ended.
        """
        await self._owned.complete(self._revert_update(version, update))

    async def abandon_update(self, update: str | None = None) -> None:
        """Forget an update that is under way; with a name, this one alone. Idempotent."""
        async with self._staging:
            self._updating.abandon(update)

    async def release_memory(self, tags: frozenset[Tag]) -> None:
        """Give memory up; with the weights goes what an update is staged in. See `Memory.release`.

        Raises:
            MemoryRefusedError: Nothing has changed.
            EngineDiedError: The engine has ended.
        """

        def release() -> None:
            self._memory.release(tags)
            if "weights" in tags:
                self._updating.give_up()

        await self._owned.complete(self._move(release))

    async def resume_memory(self, tags: frozenset[Tag]) -> None:
        """Take memory back; what waited meanwhile runs when all is there. Raises as `release_memory`."""
        await self._owned.complete(self._move(lambda: self._memory.resume(tags)))

    async def relabel(self, version: str, *, abort_running: bool) -> None:
        """Name the weights anew, after aborting everything in flight if so asked.

        Raises:
            EngineDiedError: The engine has ended.
        """

        def change() -> None:
            if abort_running:
                self._scheduler.abort(lambda _: True)
            self._scheduler.relabel(version)

        await self.thread.call(change)

    async def close(self) -> None:
        """Abort everything, let changes of weights complete, and end the thread. Idempotent."""
        self._closing = True
        self.door.turn_away(lambda _: True)
        self.thread.post(lambda: self._scheduler.end(lambda _: True), urgent=True)
        await asyncio.to_thread(self._groups.close)
        await self._owned.settled()
        await self.thread.close()
        self._memory.close()

    @contextmanager
    def _admitted(self, job: Job) -> Iterator[None]:
        """Keep the request's id to itself."""
        if self._closing:
            raise EngineDiedError("the engine is shutting down")
        if job.rid in self._in_flight:
            raise invalid(f"Duplicate request ID detected: {job.rid}")
        self._in_flight.add(job.rid)
        try:
            yield
        finally:
            self._in_flight.discard(job.rid)
            self._abort_sent.discard(job.rid)

    @contextmanager
    def _inside(self, job: Job) -> Iterator[asyncio.Future[Outcome]]:
        """Hand a request that has entered to the thread; whoever leaves before its outcome drops it, frozen or not."""
        try:
            future = self.thread.submit(job)
            try:
                yield future
            finally:
                if future.cancelled() or not future.done():
                    future.cancel()
                    self.thread.post(lambda: self._scheduler.end(lambda other: other is job))
        finally:
            self.door.leave()

    def _turned_away(self, job: Job) -> Outcome:
        return Outcome(job, {"type": "abort", "message": "Abort in waiting queue"}, "waiting", self.version)

    def _abort_jobs(self, chosen: Callable[[Job], bool], *, urgent: bool = False) -> None:
        self.thread.post(lambda: self._scheduler.abort(chosen), urgent=urgent)

    async def _move(self, move: Callable[[], None]) -> None:
        async with self._staging:
            await self.thread.call(move)

    def _check_weights(self) -> None:
        """Raise WeightsError where there are no weights to be replaced."""
        if "weights" in self.released:
            raise WeightsError("the engine has given its weights up: they have to be taken back first")

    async def _load(self, path: str, version: str | None, *, abort_running: bool) -> None:
        model = self._scheduler.model
        self._check_weights()
        # Read and validated before anybody has to wait: a bad file then costs the requests nothing.
        tensors = await asyncio.to_thread(read_weights, model, path)

        def swap() -> None:
            self._check_weights()
            write_weights(model, tensors)
            self._updating.can_revert = False
            if version is not None:
                self._scheduler.relabel(version)

        if abort_running:
            self._abort_jobs(lambda _: True, urgent=True)
        async with self.door.exclusively():
            await self.thread.call(swap)

    async def _receive_bucket(self, call: Mapping[str, Any]) -> int:
        async with self._staging:  # held for as long as the thread runs, whoever has left
            self._check_weights()
            return await asyncio.to_thread(self._updating.receive, call)

    async def _stage_broadcast(self, received: Received, begun: int, version: str | None) -> int:
        async with self._staging:  # held for as long as the thread runs, whoever has left
            if self._updating.begun != begun:
                raise BucketError("the update ended while the bucket was on its way")
            count = await asyncio.to_thread(self._updating.stage, received.tensors)
            self._groups.give_back(received)
            self._named = version or self._named
            return count

    async def _end_update(self, version: str | None, update: str | None) -> None:
        def swap() -> None:
            if self._updating.finish(update):
                self._relabel(version if version is not None else self._named)

        async with self._staging, self.door.exclusively():
            await self.thread.call(swap)

    def _relabel(self, version: str | None) -> None:
        if version is not None:
            self._scheduler.relabel(version)

    async def _revert_update(self, version: str | None, update: str | None) -> None:
        def swap() -> None:
            if self._updating.revert(update):
                self._relabel(version)

        async with self._staging, self.door.exclusively():
            await self.thread.call(swap)
