"""One thread that writes: what is queued goes into one transaction, in order.

Invariants:

- `put` never waits and never fails. What it is given is written after everything put before, together with whatever
  else is queued by then.
- A flush is answered after the commit of everything put before it, by its error where that failed.
- A transaction that fails is rolled back, and nothing is written after it: the file stays a prefix of what was put. The
  error is told once, and fails every flush from then on.
- The connection is used by the thread alone, from the start to the end; the thread closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rollout_svc.errors import NotNow

__all__ = ["JournalFailed", "Writer"]

GATHER_S: Final = 0.002
"""Seconds for which notes gather when somebody waits for them: with a fast disk each would be a transaction."""
LINGER_S: Final = 0.02
"""Seconds for which notes gather when nobody waits for them: a sync costs milliseconds, whatever it writes."""
STUCK_S: Final = 60.0
"""Seconds after which whoever waits for the disk is told so: many times what the slowest commit takes."""
_AT_ONCE: Final = 1024  # notes in one transaction, so that who waits for the first of many does not wait for all
N = TypeVar("N")
R = TypeVar("R")


class JournalFailed(NotNow):
    """Raised when the journal cannot be written, now and from now on; says why. Calls of the API end with it."""

    def __init__(self, message: str) -> None:
        super().__init__("failed", message)


class _Flush(NamedTuple):
    """Somebody who waits for the commit."""

    future: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Job(Generic[R]):
    """Work for the thread between two transactions."""

    future: asyncio.Future[R]
    do: Callable[[sqlite3.Connection], R]


class _Stop:
    """The last thing in the queue."""


class Writer(Generic[N]):
    """The thread, and its queue; made in the loop that puts into it."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        write: Callable[[list[N]], None],
        *,
        on_failure: Callable[[JournalFailed], None],
    ) -> None:
        """Start the thread.

        Args:
            connection: from here on the thread's, in autocommit mode.
            write: writes things, in order, inside the thread's transaction.
            on_failure: called in the loop, once.
        """
        self.failure: JournalFailed | None = None
        self._connection = connection
        self._write = write
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._queue: deque[N | _Flush | _Job[Any] | _Stop] = deque()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._closed: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._written = 0
        self._put = 0
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Writer queued={len(self._queue)} failure={self.failure}>"

    # -- the loop's side -------------------------------------------------------------------------------------

    def put(self, note: N) -> None:
        """Have something written soon."""
        if self.failure is None and self._closed is None:
            self._put += 1
            self._queue.append(note)
            if not self._wake.is_set():
                self._wake.set()

    async def flush(self) -> None:
        """Return once everything put so far is durable.

        Raises:
            JournalFailed: it never will be, or the disk did not answer for `STUCK_S`.
        """
        if self.failure is not None:
            raise self.failure
        if self._written != self._put:
            await self._await(_Flush(self._loop.create_future()))

    async def run(self, do: Callable[[sqlite3.Connection], R], within_s: float = STUCK_S) -> R:
        """Do something in the thread, after everything put so far is durable; returns or raises what it does.

        What takes long calls `catch_up` now and then, and is given longer.

        Raises:
            JournalFailed: something put before could not be written, or the journal is closed.
        """
        if self.failure is not None:
            raise self.failure
        if self._closed is not None:
            raise JournalFailed("the journal is closed")
        job: _Job[R] = _Job(self._loop.create_future(), do)
        await self._await(job, within_s)
        return job.future.result()

    async def _await(self, job: _Flush | _Job[Any], within_s: float = STUCK_S) -> None:
        self._queue.append(job)
        self._urgent.set()
        self._wake.set()
        try:
            async with asyncio.timeout(within_s):
                await job.future
        except TimeoutError:
            raise JournalFailed(f"the disk has not answered for {within_s:g} s") from None

    async def close(self) -> None:
        """Write what is left, and end the thread; idempotent. The caller bounds it."""
        if self._closed is None:
            self._closed = self._ended
            self._queue.append(_Stop())
            self._urgent.set()
            self._wake.set()
        await asyncio.shield(self._ended)

    # -- the thread's side -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._urgent.wait(LINGER_S)
            time.sleep(GATHER_S)
            self._wake.clear()  # before looking: what comes in between sets it again
            self._urgent.clear()
            if self._drain():
                break
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._tell(self._resolve, self._ended, None)

    def _drain(self) -> bool:
        """Write all that is queued; returns whether this was the end."""
        stop = False
        while self._queue and not stop:
            batch: list[N] = []
            flushes: list[_Flush] = []
            jobs: list[_Job[Any]] = []
            while self._queue and len(batch) < _AT_ONCE:
                item = self._queue.popleft()
                if isinstance(item, _Flush):
                    flushes.append(item)
                elif isinstance(item, _Job):
                    jobs.append(item)
                elif isinstance(item, _Stop):
                    stop = True
                else:
                    batch.append(item)
            if batch and self.failure is None:
                self._commit(batch)
            self._tell(self._flushed, len(batch), flushes)
            for job in jobs:
                self._do(job)
        return stop

    def catch_up(self) -> None:
        """From within something that `run` does: write what is queued, so that nobody waits for the end of that.

        Raises:
            JournalFailed: it cannot be written.
        """
        batch: list[N] = []
        flushes: list[_Flush] = []
        while self._queue and not isinstance(self._queue[0], _Job | _Stop):
            item = self._queue.popleft()
            if isinstance(item, _Flush):
                flushes.append(item)
            elif not isinstance(item, _Job | _Stop):
                batch.append(item)
        if batch and self.failure is None:
            self._commit(batch)
        self._tell(self._flushed, len(batch), flushes)
        if self.failure is not None:
            raise self.failure

    def _commit(self, batch: list[N]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._write(batch)
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - a note that cannot be written must not be left out in silence
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            self.failure = JournalFailed(f"the journal cannot be written: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
            self._tell(self._on_failure, self.failure)

    def _do(self, job: _Job[Any]) -> None:
        if self.failure is not None:
            self._tell(self._reject, job.future, self.failure)
            return
        try:
            result = job.do(self._connection)
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            self._tell(self._reject, job.future, error)
        else:
            self._tell(self._resolve, job.future, result)

    def _flushed(self, number: int, flushes: list[_Flush]) -> None:
        """In the loop: so many notes are written, unless they failed."""
        self._written += number
        for flush in flushes:
            if self.failure is None:
                self._resolve(flush.future, None)
            else:
                self._reject(flush.future, self.failure)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    @staticmethod
    def _resolve(future: asyncio.Future[Any], result: Any) -> None:
        if not future.done():
            future.set_result(result)

    @staticmethod
    def _reject(future: asyncio.Future[Any], error: Exception) -> None:
        if not future.done():
            future.set_exception(error)
