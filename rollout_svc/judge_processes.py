"""Synchronous judgers in processes that can be killed.

Invariants:

- A call that times out or is cancelled takes its process with it; the next call gets a fresh one.
- The clock of a call starts when a process picks it up, so that queueing is not counted.
- A judger is made once per process, from its spec; only values cross, by the process pool's own pipe.
- What crosses is bytes, made and read where an error of the judger's can be caught: an object that cannot be made
  again on the other side fails its call, never the pool.
- A pool that broke all the same, because an idle process was killed, is replaced at the next call.
- A pool that ends answers every call it still had: by itself it forgets those that no process had said to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import threading
import traceback
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Final

from pebble import ProcessPool

from rollout_svc.blame import place_of
from rollout_svc.errors import JudgeFailed
from rollout_svc.plugins import PluginSpec, construct

__all__ = ["JudgerError", "PebbleRunner"]

_SPAWN: Final = multiprocessing.get_context("spawn")  # fork would copy a process full of threads and sockets


class JudgerError(Exception):
    """Raised when a judger failed in its process; the message is the error's own, a note its traceback."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What comes back: a pickled result, or what the error said."""

    result: bytes | None
    error: str = ""
    where: str = ""
    reason: str | None = None  # of a JudgeFailed


class PebbleRunner:
    """A pool of killable judge processes, started at the first call."""

    __slots__ = ("_asked", "_max_workers", "_pool")

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._pool: ProcessPool | None = None
        self._asked: set[Future[_Answer]] = set()  # of this pool

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Run `method(payload)` of the judger in a process; see `judging.ProcessRunner`."""
        sent = pickle.dumps((spec.target, tuple(sorted(spec.options.items())), method, payload))
        if self._pool is not None and not self._pool.active:
            threading.Thread(target=_end, args=self._let_go(), name="judge-pool-end", daemon=True).start()
        if self._pool is None:
            self._pool = ProcessPool(max_workers=self._max_workers, context=_SPAWN)
        asked = self._asked
        future: Future[_Answer] = self._pool.schedule(_run, args=[sent], timeout=timeout_s)
        asked.add(future)
        future.add_done_callback(asked.discard)
        return _opened(asyncio.wrap_future(future))

    async def close(self) -> None:
        """Kill what runs and end the processes, in a thread, for that blocks; idempotent."""
        if self._pool is not None:
            await asyncio.to_thread(_end, *self._let_go())

    def _let_go(self) -> tuple[ProcessPool | None, set[Future[_Answer]]]:
        gone = self._pool, self._asked
        self._pool, self._asked = None, set()
        return gone


def _end(pool: ProcessPool | None, asked: set[Future[_Answer]]) -> None:
    if pool is None:
        return
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
    for future in tuple(asked):  # its threads have ended: nothing else will
        with contextlib.suppress(InvalidStateError):  # its caller cancelled it meanwhile
            future.set_exception(JudgerError("its process was ended: the judge processes closed"))


def _opened(answer: asyncio.Future[_Answer]) -> asyncio.Future[Any]:
    """The result inside an answer; cancelling it cancels the answer, and so kills the process."""
    result: asyncio.Future[Any] = answer.get_loop().create_future()

    def open_it(done: asyncio.Future[_Answer]) -> None:
        error = None if done.cancelled() else done.exception()
        if result.done():
            return
        if done.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            try:
                result.set_result(_read(done.result()))
            except Exception as unreadable:  # noqa: BLE001 - the judger's own objects, and its own error
                result.set_exception(unreadable)

    answer.add_done_callback(open_it)
    result.add_done_callback(lambda done: answer.cancel() if done.cancelled() else None)
    return result


def _read(answer: _Answer) -> Any:
    if answer.reason is not None:
        raise JudgeFailed(answer.reason, answer.error)
    if answer.result is None:
        error = JudgerError(answer.error)
        error.add_note(answer.where)
        raise error
    return pickle.loads(answer.result)  # noqa: S301 - from a process of ours, by its own pipe


def _run(sent: bytes) -> _Answer:
    """In the process: whatever happens is an answer."""
    try:
        target, options, method, payload = pickle.loads(sent)  # noqa: S301 - from the service itself
        result = getattr(_judger(target, repr(options), options), method)(payload)
        return _Answer(pickle.dumps(result))
    except JudgeFailed as failed:
        return _Answer(None, str(failed.message), traceback.format_exc(), str(failed.reason))
    except BaseException as error:  # noqa: BLE001 - an exit too is the judger's failure, and is told as one
        return _Answer(None, *_told(error))


def _told(error: BaseException) -> tuple[str, str]:
    try:
        place = place_of(error)
        return f"{type(error).__name__}: {error}" + (f" ({place})" if place else ""), traceback.format_exc()
    except Exception:  # noqa: BLE001 - an error whose text fails
        return type(error).__name__, ""


_made: Final[dict[tuple[str, str], Any]] = {}


def _judger(target: str, key: str, options: tuple[tuple[str, Any], ...]) -> Any:
    known = _made.get((target, key))
    if known is None:
        known = _made[(target, key)] = construct(PluginSpec(target, dict(options)), target)
    return known
