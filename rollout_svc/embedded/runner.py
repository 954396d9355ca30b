"""The engine's thread: it owns the scheduler, and the event loop talks to it by messages.

Invariants:
- The scheduler is touched by this thread alone; commands run in the order they were posted, between two steps. One that
  is urgent does not wait for a step under way: that is given up.
- Each submitted job's future gets its outcome exactly once, in the event loop, or the error that ended the thread.
- While nothing runs the thread sleeps; a command wakes it.
- Watchers hear of a step after it was taken. However many steps the loop was late for, it is told of them once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout_svc.embedded.job import Job, Outcome
    from rollout_svc.embedded.scheduler import Scheduler

T = TypeVar("T")

JOIN_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the thread: a step takes milliseconds, so longer means that it is stuck."""


class EngineDiedError(RuntimeError):
    """Raised when the engine's thread has ended: by a fault, or because it was closed."""


class EngineThread:
    """Steps a scheduler in a thread of its own. Made, and used, in one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._urgent = 0  # commands that were posted so, counted by the loop
        self._served = 0  # of those, counted by the thread
        scheduler.given_up = lambda: self._urgent != self._served
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[asyncio.Future[Outcome]] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._watchers: dict[asyncio.Future[Outcome], asyncio.Event] = {}
        self._telling = False
        self._dead: EngineDiedError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __repr__(self) -> str:
        return f"<EngineThread {'dead' if self._dead else 'alive'} pending={len(self._pending)} {self.scheduler!r}>"

    @property
    def alive(self) -> bool:
        """Whether the thread still serves."""
        return self._dead is None and self._thread.is_alive()

    @property
    def pending(self) -> int:
        """Jobs submitted whose outcome has not arrived."""
        return len(self._pending)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> asyncio.Future[Outcome]:
        """Queue a job.

        Returns:
            Its outcome; cancelling the future does not abort the job.

        Raises:
            EngineDiedError: The thread has ended; also set on the future if it ends later.
        """
        self._check()
        future: asyncio.Future[Outcome] = self._loop.create_future()
        job.tag = future
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self.post(lambda: self.scheduler.submit(job))
        return future

    @contextmanager
    def watched(self, future: asyncio.Future[Outcome]) -> Iterator[asyncio.Event]:
        """Yield an event that is set after every step, and when the future is done."""
        event = asyncio.Event()

        def ended(_: asyncio.Future[Outcome]) -> None:
            event.set()

        future.add_done_callback(ended)
        self._watchers[future] = event
        try:
            yield event
        finally:
            del self._watchers[future]

    def post(self, command: Callable[[], object], *, urgent: bool = False) -> None:
        """Have the thread run a command between two steps; an error in it ends the thread."""
        self._put(lambda: (command(), None)[1], urgent=urgent)

    async def call(self, command: Callable[[], T], *, urgent: bool = False) -> T:
        """Have the thread run a command between two steps, and return what it returns or raise what it raises.

        Args:
            command: what to do.
            urgent: give up the step under way, to be made again: for what stops all steps. Where others could go on,
                who often calls so would keep them from it.

        Raises:
            EngineDiedError: The thread has ended.
        """
        self._check()
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:  # noqa: BLE001 - handed to the caller, whole
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._hand_over()  # whom it ended is no longer counted when its caller hears of it
                self._loop.call_soon_threadsafe(_resolve, future, result)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._put(run, urgent=urgent)
        return await future

    async def close(self) -> None:
        """End the thread. Idempotent; jobs still pending get `EngineDiedError`."""
        if self._thread.is_alive():
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        self._bury(EngineDiedError("the engine is closed"))

    def _put(self, command: Callable[[], None], *, urgent: bool) -> None:
        if not urgent:
            self._inbox.put(command)
            return

        def run() -> None:
            self._served += 1
            command()

        self._urgent += 1  # first: the step that is given up must be the one under way
        self._inbox.put(run)

    def _check(self) -> None:
        if self._dead is not None:
            raise EngineDiedError(str(self._dead))

    def _run(self) -> None:
        # One thread: a step's tensors are small, and a second one only contends with the event loop.
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                while self._serve():
                    pass
        except Exception as error:  # noqa: BLE001 - reported to the loop, which ends the process
            self._loop.call_soon_threadsafe(self._report, error)

    def _serve(self) -> bool:
        """Run the commands at hand and one step; False once told to end."""
        scheduler = self.scheduler
        while not scheduler.busy or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
            self._hand_over()
        scheduler.step()
        self._hand_over()
        if self._watchers and not self._telling:
            self._telling = True
            self._loop.call_soon_threadsafe(self._tell)
        return True

    def _tell(self) -> None:
        self._telling = False  # before the watchers look: a step they miss is told again
        for event in self._watchers.values():
            event.set()

    def _hand_over(self) -> None:
        ended = self.scheduler.take_ended()
        if ended:
            self._loop.call_soon_threadsafe(_deliver, ended)

    def _report(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._bury(EngineDiedError(f"the engine has failed: {type(error).__name__}: {error}"))

    def _bury(self, error: EngineDiedError) -> None:
        self._dead = self._dead or error
        futures: set[asyncio.Future[Any]] = self._pending | self._calls
        for future in futures:
            _fail(future, error)


def _deliver(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        _resolve(outcome.job.tag, outcome)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
