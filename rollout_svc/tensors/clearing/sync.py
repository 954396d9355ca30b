"""The controller for trainers without an event loop: a loop of its own in a thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final, ParamSpec, Self, TypeVar

from rollout_svc.errors import DrainFailed
from rollout_svc.tensors.clearing.controller import Controller
from rollout_svc.tensors.clearing.records import Cleared, Statistics
from rollout_svc.tensors.clearing.roles import Consumer, Rank

__all__ = ["SyncController", "SyncStep"]

P = ParamSpec("P")
T = TypeVar("T")
NAME: Final = "shards-controller"
THREADS: Final = 2
"""For this process's own drains and figures, and for looking up actors."""
MARGIN_S: Final = 10.0
"""Waited beyond the deadlines of a call: they hold by themselves, and this is for a loop that died."""
LINE: Final = 16
"""Clears that may stand in line before one's own, for the bound of a wait."""


class SyncStep:
    """One step: see `Step`."""

    def __init__(self, controller: SyncController, trees: tuple[Any, ...]) -> None:
        self.cleared: Cleared | None = None
        self._controller = controller
        self.trees = [tree for tree in trees if tree is not None]
        controller.live(*self.trees)

    def add(self, *trees: Any) -> None:
        """Take in RTensors that this step made or got."""
        self.trees += [tree for tree in trees if tree is not None]
        self._controller.live(*trees)


class SyncController:
    """The methods of `Controller`, blocking, from any thread. Use it as a context manager or with `close`.

    Whatever is asked of it after `close` is a RuntimeError that says so.

    Args:
        given: positional arguments of `Controller`.
        settings: its keyword arguments.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix=NAME))
        self._thread = Thread(target=self._loop.run_forever, name=NAME, daemon=True)
        self._thread.start()
        try:
            self._controller = self._run(_made(given, settings), MARGIN_S)
        except BaseException:
            self._stop()
            raise
        self._limit_s = self._controller.deadline_s * LINE + MARGIN_S

    def __repr__(self) -> str:
        return f"<Sync{repr(self._controller)[1:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, role: str, consumers: Iterable[Consumer | str]) -> None:
        """See `Controller.register`."""
        self._call(self._controller.register, role, consumers if isinstance(consumers, str) else list(consumers))

    def unregister(self, role: str, rank: Rank | None = None) -> None:
        """See `Controller.unregister`."""
        self._call(self._controller.unregister, role, rank)

    def live(self, *trees: Any) -> int:
        """See `Controller.live`."""
        return self._call(self._controller.live, *trees)

    def clear_batches(self, *trees: Any) -> Cleared:
        """See `Controller.clear_batches`."""
        return self._run(self._controller.clear_batches(*trees), self._limit_s)

    def drain(self, ids: Iterable[str]) -> Cleared:
        """See `Controller.drain`."""
        return self._run(self._controller.drain(ids), self._limit_s)

    def flush_all(self) -> Cleared:
        """See `Controller.flush_all`."""
        return self._run(self._controller.flush_all(), self._limit_s)

    def statistics(self) -> Statistics:
        """See `Controller.statistics`."""
        return self._run(self._controller.statistics(), self._limit_s)

    @contextmanager
    def step(self, *trees: Any) -> Iterator[SyncStep]:
        """See `Controller.step`."""
        step = SyncStep(self, trees)
        try:
            yield step
        except BaseException as error:
            try:
                step.cleared = self.clear_batches(*step.trees)
            except DrainFailed as failed:
                step.cleared = failed.cleared
                error.add_note(str(failed))
            raise
        try:
            step.cleared = self.clear_batches(*step.trees)
        except DrainFailed as failed:
            step.cleared = failed.cleared
            raise

    def clears(self, train: Callable[P, T]) -> Callable[P, T]:
        """See `Controller.clears`."""

        @functools.wraps(train)
        def stepped(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.step(args, kwargs) as step:
                result = train(*args, **kwargs)
                step.add(result)
                return result

        return stepped

    def close(self) -> None:
        """Close the connections and end the thread; idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._controller.close(), MARGIN_S)
            self._run(self._loop.shutdown_default_executor(), MARGIN_S)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MARGIN_S)
        self._loop.close()

    def _call(self, act: Callable[..., T], *given: Any) -> T:
        """Do something of the controller's in its loop."""

        async def within() -> T:
            return act(*given)

        return self._run(within(), MARGIN_S)

    def _run(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        if self._loop.is_closed():
            coroutine.close()  # else it is warned of as one that nobody awaited
            raise RuntimeError("this controller was closed: make another one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(limit_s)


async def _made(given: tuple[Any, ...], settings: dict[str, Any]) -> Controller:
    return Controller(*given, **settings)
