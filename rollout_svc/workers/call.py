"""One engine call under way, which anyone may end without ending the task around it.

Invariant: whoever ends a call ends its exchange alone; a cancellation of the task itself passes through untouched.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Literal, Self

from rollout_svc.engines import Completion, StreamReader
from rollout_svc.gate import Lane

__all__ = ["AbortReason", "CallEnded", "EngineCall"]

AbortReason = Literal["pause", "stale", "timeout", "client", "overload", "shutdown", "worker_dead"]


class EngineCall:
    """One engine call under way: a scope that anyone may end without ending the task around it.

    Used as a context manager around the exchange. Ending it cancels the exchange inside and leaves the block as
    `CallEnded`; a cancellation of the task itself passes through untouched. It is `asyncio.timeout` without a timer:
    all calls share one limit, so the pool keeps a single timer, for the oldest.

    Attributes:
        request_id: the wire id.
        epoch: the lane's epoch when it was dispatched.
        since: loop time of the dispatch, seconds.
        cancelled_for: why it was ended, if it was.
        aborts: how often an abort that means it was sent.
        version: the worker's weight version when it was dispatched.
        held_s: seconds it spent frozen, which its time limit does not count.
        reader: has what came so far, where the answer is streamed.
        max_tokens: what was asked for.
        answer: what came, while what belongs to it is still being read.
    """

    __slots__ = (
        "_cancelling",
        "_task",
        "aborts",
        "answer",
        "cancelled_for",
        "epoch",
        "held_s",
        "lane",
        "max_tokens",
        "reader",
        "request_id",
        "sample_id",
        "since",
        "version",
    )

    def __init__(
        self, request_id: str, sample_id: str, lane: Lane, epoch: int, since: float, version: int | None = None
    ) -> None:
        self.request_id = request_id
        self.sample_id = sample_id
        self.lane: Lane = lane
        self.epoch = epoch
        self.since = since
        self.version = version
        self.held_s = 0.0
        self.reader: StreamReader | None = None
        self.max_tokens = 0
        self.answer: Completion | None = None
        self.cancelled_for: AbortReason | None = None
        self.aborts = 0
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    def __repr__(self) -> str:
        return f"<EngineCall {self.request_id} {self.lane} for {self.sample_id} {self.cancelled_for or 'open'}>"

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """Whose exchange this is; None outside it."""
        return self._task

    def cancel(self, reason: AbortReason) -> bool:
        """End the wait for the answer and close its connection; returns whether this call did it."""
        if self.cancelled_for is not None or self._task is None:
            return False
        self.cancelled_for = reason
        self._task.cancel()
        return True

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.cancelled_for is None or task is None:
            return
        # Ours is one of the cancellations the task counts: take it back; if it was the only one, it ends here.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise CallEnded from error


class CallEnded(Exception):
    """Raised out of the scope of a call that was ended from outside."""
