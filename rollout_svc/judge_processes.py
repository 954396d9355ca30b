"""Synchronous judgers in processes that can be killed.

Invariants:

- A call that times out or is cancelled takes its process with it; the next call gets a fresh one.
- The clock of a call starts when a process picks it up, so that queueing is not counted.
- A judger is made once per process, from its spec; only values cross, by the process pool's own pipe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import Future
from typing import Any, Final

from pebble import ProcessPool

from rollout_svc.plugins import PluginSpec, construct

__all__ = ["PebbleRunner"]

_SPAWN: Final = multiprocessing.get_context("spawn")  # fork would copy a process full of threads and sockets


class PebbleRunner:
    """A pool of killable judge processes, started at the first call."""

    __slots__ = ("_max_workers", "_pool")

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._pool: ProcessPool | None = None

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Run `method(payload)` of the judger in a process; see `judging.ProcessRunner`."""
        if self._pool is None:
            self._pool = ProcessPool(max_workers=self._max_workers, context=_SPAWN)
        future: Future[Any] = self._pool.schedule(
            _run, args=[spec.target, tuple(sorted(spec.options.items())), method, payload], timeout=timeout_s
        )
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """Kill what runs and end the processes; blocks for as long as that takes, so call it off the loop."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None


def _run(target: str, options: tuple[tuple[str, Any], ...], method: str, payload: Any) -> Any:
    return getattr(_judger(target, repr(options), options), method)(payload)


_made: Final[dict[tuple[str, str], Any]] = {}


def _judger(target: str, key: str, options: tuple[tuple[str, Any], ...]) -> Any:
    known = _made.get((target, key))
    if known is None:
        known = _made[(target, key)] = construct(PluginSpec(target, dict(options)), target)
    return known
