"""Checkpoints: a snapshot of everything that must survive, beside the one that a trainer writes of itself.

Invariants:

- What was noted before the call is in the snapshot; it works paused and running, and holds nobody up.
- One is written at a time; a caller that leaves does not end it, and a second one waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from sqlite3 import Error as SqliteError
from typing import Any, Final, Protocol, runtime_checkable

from rollout_svc.buffer.journal.writer import JournalFailed
from rollout_svc.buffer.snapshots import Snapshot
from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.tasks import TaskOwner

__all__ = ["Checkpoints", "Snapshots"]

_LIMIT_S: Final = 300.0
"""A snapshot is written in this time or not at all, seconds: a disk of 100 MB/s writes 30 GB."""
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Faults of the path, not of the moment; no such file is what a folder of the kernel's says."""
_MARGIN_S: Final = 30.0  # for a disk that does not come back to be asked


@runtime_checkable
class Snapshots(Protocol):
    """Storage that can be copied whole."""

    async def snapshot(self, target: Path, step: int, over: Callable[[], bool], within_s: float) -> Snapshot:
        """Write a snapshot with all that was noted so far; see `snapshots.write_snapshot`.

        Args:
            target: where it goes.
            step: trainer steps done.
            over: whether its time is over; asked now and then, in another thread.
            within_s: how long the answer may take, however slow the disk is.

        Raises:
            FileExistsError, OSError, sqlite3.Error: it cannot be written; nothing is left of it.
            TimeoutError: its time was over.
        """


class Checkpoints:
    """Writes snapshots.

    Args:
        tasks: owner of what carries a call on that nobody waits for any more.
        storage: what is copied; None: nothing survives here, and nothing can be written.
        acknowledge: consumes batches; returns those whose lease has ended.
    """

    def __init__(
        self,
        *,
        tasks: TaskOwner,
        storage: Snapshots | None,
        acknowledge: Callable[[Iterable[str]], tuple[str, ...]],
    ) -> None:
        self._tasks = tasks
        self._storage = storage
        self._acknowledge = acknowledge
        self._turn: asyncio.Lock = asyncio.Lock()

    async def write(self, path: str, step: int, ack: Iterable[str] = ()) -> dict[str, Any]:
        """Write a snapshot; returns `{path, step, bytes, groups, samples, seconds}`.

        Args:
            path: a file that is not there yet, or another snapshot, which is replaced; its folder exists.
            step: trainer steps done: what was lent for earlier steps is in the weights that go with it.
            ack: batches to acknowledge first; those whose lease has ended come back in `ack_expired`.

        Raises:
            Conflict: `no_journal`: nothing survives here; `exists`: there is another file.
            BadRequest: nothing can be written at `path`, or `step` is no step.
            NotNow: `checkpoint_failed`: the disk is full, or took too long; nothing is left of it.
        """
        if self._storage is None:
            raise Conflict("there is no journal to write a snapshot of: buffer.path is not set", type="no_journal")
        if type(step) is not int or step < 0:
            raise BadRequest.at("step", "expected a whole number, 0 or greater")
        target = _place_of(path)
        began = time.monotonic()
        expired = self._acknowledge(ack)
        work = self._tasks.spawn("checkpoint", self._write(self._storage, target, step), handled=True)
        work.add_done_callback(_seen)
        found = await asyncio.shield(work)
        record = {"path": str(target), **found._asdict(), "seconds": round(time.monotonic() - began, 6)}
        return record | ({"ack_expired": list(expired)} if expired else {})

    async def _write(self, storage: Snapshots, target: Path, step: int) -> Snapshot:
        async with self._turn:
            end, stopped = time.monotonic() + _LIMIT_S, threading.Event()

            def over() -> bool:
                return stopped.is_set() or time.monotonic() > end

            try:
                return await storage.snapshot(target, step, over, _LIMIT_S + _MARGIN_S)
            except FileExistsError as error:
                raise Conflict(f"{target} is there already: {error}", type="exists") from error
            except (OSError, SqliteError, JournalFailed) as error:
                if isinstance(error, OSError) and error.errno in _REFUSED:
                    raise BadRequest.at("path", f"cannot write {target}: {error.strerror}") from error
                raise NotNow("checkpoint_failed", f"cannot write {target}: {error}") from error
            finally:
                stopped.set()  # a service that stops waits for no copy: the thread sees it and ends


def _place_of(path: str) -> Path:
    if "\0" in path:
        raise BadRequest.at("path", "no file has a null character in its name")
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise BadRequest.at("path", f"there is no folder {target.parent}")
    return target


def _seen(task: asyncio.Task[Snapshot]) -> None:
    """Whoever asked for it may have gone; then nobody is told of its error."""
    if not task.cancelled():
        task.exception()
