"""What an agent loop does that is not the model's: tools, environments, and the clean-up after them.

Invariants:

- Nothing outlives its sample: what was begun is cleaned up when the loop ends, however it ends; a synchronous call
  runs in a process that is killed.
- Clean-up is cancelled by nobody: it runs in a task of its own, for a bounded time, in the reverse order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import structlog

from rollout_svc import blame
from rollout_svc.errors import SampleFailure
from rollout_svc.judging import ProcessRunner
from rollout_svc.plugins import PluginSpec
from rollout_svc.tasks import TaskOwner

__all__ = ["CLEANUP_S", "Work"]

_log = structlog.get_logger("agent")

CLEANUP_S: Final = 10.0
"""Seconds for each clean-up."""
_LINGER_S: Final = 0.5  # seconds that the agent's own coroutine has after each of its two cancellations

R = TypeVar("R")
CleanUp = Callable[[], Awaitable[object]]


class Work:
    """Tool calls and clean-ups of one run of an agent loop."""

    __slots__ = ("_cleanups", "_name", "_processes", "_tasks", "failed")

    def __init__(self, name: str, tasks: TaskOwner, processes: ProcessRunner | None) -> None:
        """Make it.

        Args:
            name: whose work it is, for people who look for what is stuck.
            tasks: who owns the clean-up.
            processes: run synchronous calls; None: there are none here.
        """
        self.failed: list[str] = []  # what went wrong in clean-ups
        self._name = name
        self._tasks = tasks
        self._processes = processes
        self._cleanups: list[CleanUp] = []

    def on_end(self, cleanup: CleanUp) -> None:
        """Have something cleaned up when the loop has ended, however it did; the last one first."""
        self._cleanups.append(cleanup)

    def start(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run the agent's own coroutine beside its loop; it is cancelled when the loop ends, twice if need be."""
        task = self._tasks.spawn(f"{name}:{self._name}", _awaited(coroutine), handled=True)

        async def end() -> None:
            for _ in range(2):  # the first may be swallowed; what swallows both is named when the service stops
                task.cancel()
                await asyncio.wait({task}, timeout=_LINGER_S)

        self.on_end(end)
        return task

    async def call(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> Any:
        """Call a method of a plugin in a process that is killed when this is cancelled, or takes too long.

        Raises:
            TimeoutError: it took longer.
            Exception: whatever it raised, or why no process could run it.
        """
        if self._processes is None:
            raise SampleFailure("agent_error", "no process to run a synchronous tool in")
        return await self._processes.submit(spec, method, payload, timeout_s)

    async def bounded(self, work: Awaitable[Any], timeout_s: float, *, cleans_up: bool = False) -> Any:
        """Await what is not ours, so long at most; it delays nobody by swallowing its cancellation.

        Args:
            work: what to await.
            timeout_s: how long.
            cleans_up: it ends what was begun: nobody cancels it before its time.

        Raises:
            TimeoutError: it took longer.
            Exception: whatever it raised.
        """
        kind = "clean-up" if cleans_up else "tool"
        task = self._tasks.spawn(f"{kind}:{self._name}", _awaited(work), handled=True, cleans_up=cleans_up)
        task.add_done_callback(_look)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise TimeoutError
        finally:
            task.cancel()
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()

    async def side_by_side(self, works: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Do things of ours at the same time; raises what the first of them raised, when all have ended."""
        tasks = [self._tasks.spawn(f"tools:{self._name}", work, handled=True) for work in works]
        for task in tasks:
            task.add_done_callback(_look)
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Clean up; one that is cancelled here ends its own wait, and the clean-up goes on."""
        cleaning = self.leave()
        if cleaning is not None:
            await asyncio.shield(cleaning)

    def leave(self) -> asyncio.Task[None] | None:
        """Have it cleaned up by a task, which is returned; None where nothing is to be cleaned up any more."""
        if not self._cleanups:
            return None
        due, self._cleanups = self._cleanups, []
        return self._tasks.spawn(f"clean-up:{self._name}", self._clean(due), cleans_up=True)

    async def _clean(self, due: list[CleanUp]) -> None:
        for cleanup in reversed(due):
            try:
                await self.bounded(cleanup(), CLEANUP_S, cleans_up=True)
            except TimeoutError:
                self._went_wrong(f"not done in {CLEANUP_S:g} s")
            except Exception as error:  # noqa: BLE001 - the agent's own code; the others are to be cleaned up all the same
                self._went_wrong(blame.told(error)[0])

    def _went_wrong(self, told: str) -> None:
        self.failed.append(told)
        _log.warning("clean_up.failed", sample=self._name, error=told)


async def _awaited(work: Awaitable[Any]) -> Any:
    """Await what may call `exit`, which would end the whole service."""
    with blame.contained():
        return await work


def _look(task: asyncio.Task[Any]) -> None:
    """See what it raised: where nobody waits for it any more, nobody else does."""
    if not task.cancelled():
        task.exception()
