"""The owner of every asyncio task the service makes.

Invariants:

- Every task is created here and named; `live` is all of them, and nothing else.
- A task that ends with an error calls `on_death` once, at once, unless it was spawned `handled`; a `critical` one
  does so whenever it ends.
- Closing cancels each task once and waits under one deadline; a task that swallows its cancellation is
  reported by name, never waited for again.
- One that is cleaning up, in a task of its own or in one that somebody else has cancelled, is left alone until the
  last tenth of that time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final
from weakref import WeakSet

__all__ = ["TaskOwner", "wait_until"]

_LAST_SHARE: Final = 0.1  # of the time that closing may take, for what is cancelled last

OnDeath = Callable[[str, BaseException, bool], None]  # task name, its error, whether it was critical


class TaskOwner:
    """Creates, names and finally reaps tasks."""

    __slots__ = ("_cleaning", "_closing", "_on_death", "_tasks")

    def __init__(self, on_death: OnDeath | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[Any]] = set()
        self._cleaning: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._on_death = on_death

    @property
    def live(self) -> frozenset[asyncio.Task[Any]]:
        """Tasks that have not ended."""
        return frozenset(self._tasks)

    def spawn(
        self,
        name: str,
        coroutine: Coroutine[Any, Any, Any],
        *,
        critical: bool = False,
        handled: bool = False,
        cleans_up: bool = False,
        on_end: Callable[[], None] | None = None,
    ) -> asyncio.Task[Any]:
        """Start a named task.

        Args:
            name: `kind:id`, for people who look for what is stuck.
            coroutine: what to run.
            critical: it must live as long as the service: any end but a cancellation is a death.
            handled: whoever awaits or watches the task deals with its errors.
            cleans_up: it ends what others began, and is cancelled last.
            on_end: called when it has ended, however it did; cheaper than a callback of its own. Not for the other two.
        """
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        if cleans_up:
            self._cleaning.add(task)
        if on_end is not None:

            def ended(task: asyncio.Task[Any]) -> None:
                self._ended(task)
                on_end()

            task.add_done_callback(ended)
        elif handled:
            task.add_done_callback(self._tasks.discard)
        else:
            task.add_done_callback(self._critical_ended if critical else self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None and self._on_death is not None:
                self._on_death(task.get_name(), error, False)

    def _critical_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._on_death is None:
            return
        error = task.exception() or RuntimeError(f"{task.get_name()} ended although it must not")
        self._on_death(task.get_name(), error, True)

    async def close(self, deadline: float) -> tuple[str, ...]:
        """Cancel all tasks and wait until `deadline` (loop time); returns the names of those that still run.

        Tasks that begin meanwhile, as clean-ups of those that were cancelled do, are waited for as well.
        """
        loop, current = asyncio.get_running_loop(), asyncio.current_task()
        patience = deadline - _LAST_SHARE * max(0.0, deadline - loop.time())
        self._closing &= self._tasks
        while others := self._tasks - {current}:
            gently = loop.time() < patience
            spared = {task for task in others if gently and (task in self._cleaning or task.cancelling())}
            for task in others - spared - self._closing:
                task.cancel()
                self._closing.add(task)
            await wait_until(others, patience if gently else deadline)
            if not gently:
                break
        return tuple(sorted(task.get_name() for task in self._tasks if task is not current))


async def wait_until(tasks: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    """Wait for all of them, at most until `deadline` (loop time); cancels nothing and raises nothing of theirs."""
    pending = {task for task in tasks if not task.done()}
    remaining = deadline - asyncio.get_running_loop().time()
    if pending and remaining > 0:
        await asyncio.wait(pending, timeout=remaining)
    for task in pending:
        if task.done() and not task.cancelled():
            with contextlib.suppress(BaseException):
                task.exception()
