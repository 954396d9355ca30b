"""Finished groups written down by a thread of its own, in the order they finished.

Invariants:

- The event loop hands over values and never waits on the disk. What is handed over and not written is bounded; a group
  that finds no room waits for it, at most `PATIENCE_S`, as part of its put.
- A completion is written once: a group that was handed over says so itself (`recorded`), however often its put begins.
  A service that was killed writes a group again that had finished and was not yet stored.
- What cannot be written is counted and told, once until a line is written again; it stops nobody.
- A missing ground truth is written as null, and warned about once per task.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rollout_svc.config import TrajectoriesConfig
from rollout_svc.events import EventBus, GroundTruthMissing, TrajectoriesFailing
from rollout_svc.group import Group
from rollout_svc.prompt import Prompt
from rollout_svc.trajectories.files import LineFile
from rollout_svc.trajectories.record import Entry, entry_of

__all__ = ["CLOSE_S", "MOST_BYTES", "MOST_LINES", "PATIENCE_S", "Trajectories"]

MOST_LINES: Final = 256
"""Groups handed over and not written, at most."""
MOST_BYTES: Final = 64 * 2**20
"""Their bytes, at most, but for one that is larger by itself."""
PATIENCE_S: Final = 30.0
"""How long a put waits for room. A disk that takes nothing for so long is taken to have failed, until it does."""
CLOSE_S: Final = 4.0
"""How long `close` waits for what is left."""


class Trajectories:
    """The record of every finished group; with no `path` it keeps none."""

    def __init__(
        self,
        config: TrajectoriesConfig,
        *,
        bus: EventBus,
        wall: Callable[[], float] = time.time,
        make_file: Callable[[TrajectoriesConfig], LineFile] | None = None,
    ) -> None:
        """Make the record; nothing is opened before the first group.

        Args:
            config: where it is, and how large its files are.
            bus: where trouble is told.
            wall: seconds since 1970, UTC.
            make_file: makes what is written to, in the writing thread; None: a file at `config.path`.
        """
        self._config = config
        self._bus = bus
        self._wall = wall
        self._make_file = make_file or _file_of
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._handed_over: deque[int] = deque()  # bytes of each, oldest first
        self._backlog_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stalled = False
        self._told = False
        self._closing = False
        self._untrue: set[str] = set()
        self._written = self._failed = self._bytes = 0

    def __repr__(self) -> str:
        return f"<Trajectories {self._config.path} written={self._written} waiting={len(self._handed_over)}>"

    def as_json(self) -> dict[str, Any] | None:
        """What status says of it; None where none is kept."""
        if self._config.path is None:
            return None
        return {
            "path": self._config.path,
            "written": self._written,
            "failed": self._failed,
            "bytes": self._bytes,
        }

    async def record(self, group: Group) -> None:
        """Have a group written whose members are all COMPLETED, unless it was; waits while there is no room."""
        if self._config.path is None or group.recorded:
            return
        room = await self._room()
        group.recorded = True
        if self._closing:
            self._lost(1, "the service has stopped")
            return
        self._look_at(group.prompt)
        if not room:
            self._lost(1, f"no room for {PATIENCE_S:g} s: the disk is slower than the groups")
            return
        loop = self._begin()
        entry = entry_of(group, now=loop.time(), wall=self._wall())
        self._handed_over.append(entry.size)
        self._backlog_bytes += entry.size
        self._entries.put(entry)
        self._wake()

    async def close(self) -> None:
        """Write what was handed over, and close the file; at most `CLOSE_S`, what is left then is lost and told."""
        self._closing = True
        if self._ended is None:
            return
        self._entries.put(None)
        await asyncio.wait({self._ended}, timeout=CLOSE_S)
        if self._handed_over:
            lost = len(self._handed_over)
            self._handed_over.clear()
            self._lost(lost, f"not written {CLOSE_S:g} s after the service stopped")

    # -- the loop's side -------------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return len(self._handed_over) >= MOST_LINES or self._backlog_bytes >= MOST_BYTES

    async def _room(self) -> bool:
        """Wait for room, in turn; false when none came, and at once while the disk takes nothing at all."""
        if not self._full and not self._waiting:
            return True
        if self._stalled:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        came = False
        try:
            async with asyncio.timeout(PATIENCE_S):
                await turn
            came = True
        except TimeoutError:
            self._stalled = True
        finally:
            self._waiting.remove(turn)
            if not came:
                self._wake()  # it may have been let in just now, and nobody uses it
        return came

    def _wake(self) -> None:
        """Let in who waits longest, if there is room; until it has come in, nobody overtakes it."""
        if self._waiting and not self._full:
            turn = self._waiting[0]
            if not turn.done():
                turn.set_result(None)

    def _look_at(self, prompt: Prompt) -> None:
        if prompt.ground_truth is None and prompt.task not in self._untrue:
            self._untrue.add(prompt.task)
            self._bus.emit(GroundTruthMissing(prompt.task, prompt.prompt_id))

    def _begin(self) -> asyncio.AbstractEventLoop:
        """Start the thread with the first group."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ended = self._loop.create_future()
            threading.Thread(target=self._work, args=(self._loop,), name="trajectories", daemon=True).start()
        return self._loop

    def _lost(self, lines: int, error: str) -> None:
        self._failed += lines
        self._tell(error)

    def _tell(self, error: str) -> None:
        if not self._told:
            self._told = True
            self._bus.emit(TrajectoriesFailing(str(self._config.path), error, self._failed))

    def _wrote(self, size: int, error: str | None, trouble: str | None) -> None:
        """One line is done with, one way or the other."""
        if not self._handed_over:
            return  # `close` has given it up
        self._backlog_bytes -= self._handed_over.popleft()
        self._stalled = False
        if error is not None:
            self._lost(1, error)
        else:
            self._written += 1
            self._bytes += size
            if trouble is None:
                self._told = False
            else:
                self._tell(trouble)
        self._wake()

    def _is_closed(self, error: str | None) -> None:
        if error is not None:
            self._tell(error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # -- the thread's side -----------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        file = self._make_file(self._config)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            while (entry := self._entries.get()) is not None:
                size, error = 0, None
                try:
                    line = entry.line()
                    size = len(line)
                    file.append(line)
                except Exception as failed:  # noqa: BLE001 - told and counted in the loop; this thread outlives it
                    error = _described(failed)
                trouble = None if file.trouble is None else f"cannot set the file aside: {_described(file.trouble)}"
                loop.call_soon_threadsafe(self._wrote, size, error, trouble)
            error = None
            try:
                file.close()
            except OSError as failed:
                error = _described(failed)
            loop.call_soon_threadsafe(self._is_closed, error)


def _file_of(config: TrajectoriesConfig) -> LineFile:
    return LineFile(str(config.path), max_bytes=config.max_file_bytes, max_files=config.max_files)


def _described(error: Exception) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
