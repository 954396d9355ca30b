"""An event loop without a world: its clock jumps, and the order of everything in it follows from its seed.

Invariants:

- No sockets, threads or executors: whoever asks for one breaks the history.
- Tasks and futures hash by their number, timers fire by (time, number): no order depends on an address.
- A life that was killed runs no line more: neither its tasks nor its timers nor its `finally` blocks.
- Nothing ready and nothing scheduled is a deadlock; too many turns without time passing is a livelock. Both are errors.
"""

from __future__ import annotations

import asyncio
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from math import ceil
from random import Random
from typing import Any, Final, NoReturn

__all__ = ["LIFE", "Deadlock", "Livelock", "SimLoop"]

LIFE: ContextVar[int] = ContextVar("LIFE", default=0)
"""Which life of the service code belongs to: 0 is the world around it. Tasks inherit it from whoever made them."""
_TICKS: Final = 512  # timers a second at most: what is that close together falls together, and races
_LIVES: Final = 1024  # no history has as many
_LIVELOCK_TURNS: Final = 20_000  # turns at one moment: no history comes near


class Deadlock(RuntimeError):
    """Raised when nothing is ready and nothing is scheduled, and the history is not over."""


class Livelock(RuntimeError):
    """Raised when the loop turns and turns and no time passes."""


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set follows from when it was made."""

    def __init__(self, coroutine: Any, *, loop: SimLoop, number: int, context: Context | None = None) -> None:
        self.number = number
        self.life = LIFE.get() if context is None else context.get(LIFE, 0)
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimFuture(asyncio.Future[Any]):
    """A future likewise."""

    number = 0

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.BaseEventLoop):
    """One history's loop."""

    def __init__(self, *, after_turn: Callable[[], None], shuffle: Random | None = None) -> None:
        """Make a loop.

        Args:
            after_turn: called after every turn: where invariants are looked at.
            shuffle: adversarial: wake-ups of a turn come in an order of its own.
        """
        super().__init__()
        self.turns = 0
        self.broken: BaseException | None = None
        self._after_turn = after_turn
        self._shuffle = shuffle
        self._now = 0.0
        self._made = 0
        self._still = 0
        self._dead: set[int] = set()
        self._tasks: list[SimTask] = []
        self._prune_at = 256
        self._ready: deque[asyncio.Handle]
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._unhandled)

    # -- what asyncio asks of a loop -------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the history began."""
        return self._now

    def create_future(self) -> SimFuture:
        """Make a numbered future."""
        future = SimFuture(loop=self)
        self._made += 1
        future.number = self._made
        return future

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """Run a callback in the next turn, unless its life is over."""
        handle = asyncio.Handle(callback, args, self, context)
        if self._dead and handle._context.get(LIFE, 0) in self._dead:  # type: ignore[attr-defined]
            handle.cancel()
            return handle
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        """Run a callback at a time, unless its life is over."""
        when = ceil(when * _TICKS) / _TICKS
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._made += 1
        if self._dead and timer._context.get(LIFE, 0) in self._dead:  # type: ignore[attr-defined]
            timer.cancel()
            return timer
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after a while."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            self._jump()
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        if self._shuffle is not None and len(ready) > 1:
            mixed = list(ready)
            self._shuffle.shuffle(mixed)
            ready.clear()
            ready.extend(mixed)
        for _ in range(len(ready)):
            if not ready:
                break
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        self.turns += 1
        self._still += 1
        if self._still > _LIVELOCK_TURNS:
            raise Livelock(f"{self._still} turns at t={self._now:.6f}")
        self._after_turn()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is ready and nothing is scheduled at t={self._now:.6f}")
        when = timers[0][0]
        if when > self._now:
            self._now = when
            self._still = 0

    # -- what no history may have ----------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refuse: an executor has a clock of its own."""
        raise self._broke(f"an executor was asked for: {func!r}")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> NoReturn:  # type: ignore[override]
        """Refuse: there are no threads."""
        raise self._broke(f"a thread calls: {callback!r}")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Let it go: whoever iterated over it was cancelled or killed, and it waits for nothing of its own."""

    def _broke(self, what: str) -> RuntimeError:
        error = RuntimeError(what)
        self.broken = self.broken or error
        return error

    def _unhandled(self, _: Any, context: dict[str, Any]) -> None:
        if self.broken is None:
            self.broken = context.get("exception") or RuntimeError(str(context.get("message")))

    # -- lives -----------------------------------------------------------------------------------------------

    def _make_task(self, loop: Any, coroutine: Coroutine[Any, Any, Any], context: Context | None = None) -> SimTask:
        self._made += 1
        task = SimTask(coroutine, loop=self, number=self._made, context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [known for known in self._tasks if known.life in self._dead or not known.done()]
            self._prune_at = 256 + 2 * len(self._tasks)
        return task

    def tasks_of(self, life: int) -> list[SimTask]:
        """Tasks of a life that have not ended."""
        return [task for task in self._tasks if task.life == life and not task.done()]

    def kill(self, life: int) -> None:
        """End a life as `kill -9` does: nothing of it runs again."""
        self._dead.add(life)
        kept = [handle for handle in self._ready if handle._context.get(LIFE, 0) != life]  # type: ignore[attr-defined]
        self._ready.clear()
        self._ready.extend(kept)
        self._timers[:] = [
            entry
            for entry in self._timers
            if entry[2]._context.get(LIFE, 0) != life  # type: ignore[attr-defined]
        ]
        heapq.heapify(self._timers)

    def bury(self) -> None:
        """Close what is left, once the history is over: nothing it does then counts."""
        self._dead.update(range(_LIVES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coroutines that were made and never begun
            for task in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
            self._tasks.clear()
        self._ready.clear()
        self._timers.clear()


def _close(coroutine: Any) -> None:
    for _ in range(3):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001, S112 - its history is over, and so is whatever it meant to say
            continue
        return
