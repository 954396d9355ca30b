"""The engine as the event loop sees it: requests in flight, the door, the thread, and what control does to them.

Invariants:
- A request id is in flight at most once.
- An abort ends what is in flight when it is asked for, queued, running or at the door, and nothing that comes later.
- Weights change when nothing runs; a change that fails leaves weights and label as they were.
- A cancelled caller leaves nothing behind: its request is aborted, a change of weights it began still completes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from rollout_svc.embedded.door import Door
from rollout_svc.embedded.job import Outcome
from rollout_svc.embedded.model import read_weights, write_weights
from rollout_svc.embedded.runner import EngineDiedError, EngineThread
from rollout_svc.embedded.wire import invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from rollout_svc.embedded.job import Job
    from rollout_svc.embedded.scheduler import Scheduler

T = TypeVar("T")


class Engine:
    """Runs requests on a scheduler's thread. Made, and used, in one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.door = Door()
        self.thread = EngineThread(scheduler)
        self._scheduler = scheduler
        self._in_flight: set[str] = set()
        self._owned: set[asyncio.Task[Any]] = set()
        self._closing = False

    def __repr__(self) -> str:
        return f"<Engine in_flight={len(self._in_flight)} {self.door!r} {self.thread!r}>"

    @property
    def version(self) -> str:
        """The label of the weights."""
        return self._scheduler.version

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._scheduler.batch.jobs)

    @property
    def waiting(self) -> int:
        """Requests that have not started: queued, or at the door."""
        return len(self._in_flight) - min(self.running, len(self._in_flight))

    @property
    def busy(self) -> bool:
        """Whether requests are queued or running; those at the door do not count."""
        return self.door.inside > 0

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    async def generate(self, job: Job) -> Outcome:
        """Run a request to its end, waiting at the door while it is closed.

        Raises:
            RefusedError: A request with this id is in flight.
            EngineDiedError: The engine has ended.
        """
        if self._closing:
            raise EngineDiedError("the engine is shutting down")
        if job.rid in self._in_flight:
            raise invalid(f"Duplicate request ID detected: {job.rid}")
        self._in_flight.add(job.rid)
        try:
            if not await self.door.enter(job.rid):
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                return Outcome(job, reason, "waiting", self.version)
            try:
                return await self.thread.submit(job)
            except asyncio.CancelledError:
                self._abort_jobs(lambda other: other is job)
                raise
            finally:
                self.door.leave()
        finally:
            self._in_flight.discard(job.rid)

    def abort(self, rid: str) -> None:
        """Abort every request whose id begins with `rid`, provided that one is named exactly so; else do nothing."""
        if rid in self._in_flight:
            self.door.turn_away(lambda other: other.startswith(rid))
            self._abort_jobs(lambda job: job.rid.startswith(rid))

    def abort_all(self) -> None:
        """Abort everything in flight."""
        self.door.turn_away(lambda _: True)
        self._abort_jobs(lambda _: True)

    async def pause(self) -> None:
        """Close the door and abort what is inside; done when all of it has been answered. Idempotent."""
        self.door.pause()
        self._abort_jobs(lambda _: True)
        await self.door.emptied()

    def resume(self) -> None:
        """Open the door. Idempotent."""
        self.door.resume()

    async def load(self, path: str, version: str | None, *, abort_running: bool) -> None:
        """Replace the weights by those of a file, and their label if one is given.

        Waits until nothing runs, holding back what comes meanwhile.

        Args:
            path: A safetensors file, or a directory holding `model.safetensors`.
            version: The new label; None keeps the old one.
            abort_running: Abort what is queued or running rather than wait for it.

        Raises:
            WeightsError: The file does not fit; nothing has changed, and nothing was aborted.
            EngineDiedError: The engine has ended.
        """
        await self._complete(self._load(path, version, abort_running=abort_running))

    async def relabel(self, version: str, *, abort_running: bool) -> None:
        """Name the weights anew, after aborting everything in flight if so asked.

        Raises:
            EngineDiedError: The engine has ended.
        """
        if abort_running:
            self.door.turn_away(lambda _: True)

        def change() -> None:
            if abort_running:
                self._scheduler.abort(lambda _: True)
            self._scheduler.relabel(version)

        await self.thread.call(change)

    async def close(self) -> None:
        """Abort everything, let changes of weights complete, and end the thread. Idempotent."""
        self._closing = True
        self.abort_all()
        if self._owned:
            await asyncio.wait(self._owned)
        await self.thread.close()

    def _abort_jobs(self, chosen: Callable[[Job], bool]) -> None:
        self.thread.post(lambda: self._scheduler.abort(chosen))

    async def _load(self, path: str, version: str | None, *, abort_running: bool) -> None:
        model = self._scheduler.model
        # Read and validated before anybody has to wait: a bad file then costs the requests nothing.
        tensors = await asyncio.to_thread(read_weights, model, path)

        def swap() -> None:
            write_weights(model, tensors)
            if version is not None:
                self._scheduler.relabel(version)

        if abort_running:
            self._abort_jobs(lambda _: True)
        async with self.door.exclusively():
            await self.thread.call(swap)

    async def _complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that goes on to its end even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work, name="weights")
        self._owned.add(task)
        task.add_done_callback(self._disown)
        return await asyncio.shield(task)

    def _disown(self, task: asyncio.Task[Any]) -> None:
        self._owned.discard(task)
        if not task.cancelled():
            task.exception()  # looked at here, for the caller may have left
