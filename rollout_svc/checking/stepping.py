"""A coroutine that tells whenever it waits, so that something can be done to it at every such point.

Invariants:

- It runs as it would without: what is sent or thrown in arrives, what it raises or returns goes out.
- A loop that something holds is noticed by a thread beside it, told where, and freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import FrameType
from typing import Any, Final

from rollout_svc.checking import places
from rollout_svc.checking.clock import CheckLoop

__all__ = ["Runaway", "Stepped", "ends_within", "watched"]

_HELD_S: Final = 0.5  # of real time: what holds the loop so long is told
_FREED_S: Final = 3.0  # so long, and it is ended
_TIMES: Final = 5  # that it is ended, before the whole check gives up
_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 20.0  # of real time
_CHUNK_S: Final = 2.0  # of the loop's time between two looks at the real one


class Runaway(BaseException):
    """Raised in the plugin to end what would never end; no handler of errors is to stop it."""


class Stepped:
    """Awaits a coroutine, and calls `on_wait(number)` whenever that waits, from 1 on."""

    __slots__ = ("_on_wait", "coroutine", "waits")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[int], None]) -> None:
        self.coroutine = coroutine
        self.waits = 0
        self._on_wait = on_wait

    @property
    def where(self) -> str:
        """The line that waits now."""
        return places.of_suspended(self.coroutine)

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                if thrown is None:
                    waits_for = self.coroutine.send(None)
                else:
                    error, thrown = thrown, None
                    waits_for = self.coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            self.waits += 1
            self._on_wait(self.waits)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - it is thrown in above
                thrown = error


@contextlib.contextmanager
def watched(loop: CheckLoop, on_held: Callable[[float, str], None]) -> Iterator[None]:
    """Have the loop, which runs in this thread, watched: `on_held(seconds, where)` tells what held it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    told: list[tuple[float, str]] = []
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(loop, threading.get_ident(), done, told), name="asyncio_watch", daemon=True
    )
    before = signal.signal(signal.SIGUSR2, _free)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGUSR2, before)
        for seconds, where in told:
            on_held(seconds, where)


def _free(_signal: int, _frame: FrameType | None) -> None:
    raise Runaway("it held the event loop")


def _watch(loop: CheckLoop, thread: int, done: threading.Event, told: list[tuple[float, str]]) -> None:
    turns, since, where, freed = -1, time.monotonic(), "", 0
    while not done.wait(_LOOK_S):
        now = time.monotonic()
        if loop.turns != turns or not loop.is_running():
            if where:
                told.append((now - since, where))
            turns, since, where, freed = loop.turns, now, "", 0
            continue
        if now - since >= _HELD_S and not where:
            frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to see where another thread is
            where = places.of_frame(frame)
        if where and now - since >= _FREED_S * (freed + 1):
            if freed == _TIMES:
                sys.stderr.write(f"{where}: held the event loop, and does not let itself be ended\n")
                sys.stderr.flush()
                os._exit(1)
            freed += 1
            signal.pthread_kill(thread, signal.SIGUSR2)
    if where:
        told.append((time.monotonic() - since, where))


async def ends_within(task: asyncio.Task[Any], seconds: float) -> bool:
    """Wait for a task, so long at most; returns whether it has ended.

    Where something real is under way it is waited for `_PATIENCE_S` at most, whatever the clock says.
    """
    loop = asyncio.get_running_loop()
    end, patience = loop.time() + seconds, time.monotonic() + _PATIENCE_S
    while not task.done() and (rest := end - loop.time()) > 0 and time.monotonic() < patience:
        await asyncio.wait({task}, timeout=min(rest, _CHUNK_S))
    return task.done()
