"""One task's judger, its limits, and who waits for it.

Invariants:

- Whoever waits is served in order, and leaves when the lane's gate closes; nobody overtakes.
- No more calls run at once than `concurrency`, and none begins before the rate allows it.
- A place that was given and is not used goes to the next one, or back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from rollout_svc.errors import Interrupted
from rollout_svc.gate import Lane
from rollout_svc.judging.figures import JudgeFigures
from rollout_svc.judging.rate import TokenBucket
from rollout_svc.plugins import PluginSpec

__all__ = ["JudgeDesk", "OnFailure", "Partial"]

OnFailure = Literal["fail", "redo"]
Partial = Literal["wait", "fail"]

_SINGLE: Final = "judge"
_GROUP: Final = "judge_group"
_REDO_S: Final = 1.0  # seconds before a judge is asked again, doubling
_REDO_CAP_S: Final = 30.0


class JudgeDesk:
    """One judger, its limits, and who waits for it; see the module's invariants.

    Attributes:
        parts: the desks of the judgers this one asks, by their names.
        redos: how often one call is repeated before its failure counts against the sample.
        partial: what a group judger makes of a member that failed: `wait` until it is made again, or `fail` the group.
    """

    __slots__ = (
        "_bucket",
        "_judger",
        "_resting",
        "_timer",
        "_waiting",
        "by_group",
        "concurrency",
        "figures",
        "instant",
        "is_async",
        "name",
        "partial",
        "parts",
        "redos",
        "running",
        "spec",
        "timeout_s",
    )

    def __init__(
        self,
        *,
        name: str,
        judger: Any,
        spec: PluginSpec,
        timeout_s: float,
        concurrency: int | None = None,
        per_minute: float | None = None,
        redos: int = 0,
        partial: Partial = "wait",
        parts: Mapping[str, JudgeDesk] | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.redos = redos
        self.partial: Partial = partial
        self.parts = dict(parts or {})
        self.by_group = hasattr(judger, _GROUP)
        self.is_async = inspect.iscoroutinefunction(getattr(judger, self.method))
        self.instant = not self.is_async and bool(getattr(judger, "instant", False))
        self.running = 0
        self.figures = JudgeFigures()
        self._judger = judger
        self._bucket = None if per_minute is None else TokenBucket(per_minute)
        self._waiting: deque[tuple[Lane, asyncio.Future[None]]] = deque()
        self._resting: list[tuple[Lane, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> int:
        """Calls that wait for a place."""
        return len(self._waiting)

    @property
    def method(self) -> str:
        """The method this judger is called by."""
        return _GROUP if self.by_group else _SINGLE

    @property
    def at_once(self) -> bool:
        """Whether it is called in the loop and nothing limits it: there is nothing to wait for."""
        return self.instant and self._bucket is None

    def call(self, payload: Any) -> Any:
        """Make the coroutine of an async judger, or the verdict of an instant one."""
        return getattr(self._judger, self.method)(payload)

    def below(self) -> Iterator[JudgeDesk]:
        """Yield the desks of the judgers this one asks, and of those they ask."""
        for part in self.parts.values():
            yield part
            yield from part.below()

    def seat(self, ask: Any) -> None:
        """Give a judger that asks others the way to ask them."""
        self._judger.ask = ask

    async def close(self) -> None:
        """Have the judger give back what it holds, its connections for one."""
        close = getattr(self._judger, "close", None)
        if inspect.iscoroutinefunction(close):
            await close()

    async def enter(self, lane: Lane) -> None:
        """Take a place; waits for one, and raises Interrupted when the lane closes meanwhile."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self._admits(loop.time()):
            self.running += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append((lane, place))
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()  # it was given just now, and nobody will use it
            raise

    def leave(self) -> None:
        """Give the place back, and so to whoever waits longest: in the same step, so nobody overtakes."""
        self.running -= 1
        self._serve()

    async def rest(self, lane: Lane, tries: int) -> None:
        """Wait before a judge is asked again; raises Interrupted when the lane closes meanwhile.

        Args:
            lane: whose.
            tries: calls made so far.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        entry = (lane, over)
        self._resting.append(entry)
        timer = loop.call_later(redo_after_s(tries), _end, over)
        try:
            await over
        finally:
            timer.cancel()
            self._resting.remove(entry)

    def turn_away(self, lane: Lane) -> None:
        """End the wait of everyone of this lane: its gate closed."""
        for entry in (*self._waiting, *self._resting):
            if entry[0] == lane and not entry[1].done():
                entry[1].set_exception(Interrupted("the gate closed before this judge started"))
        self._serve()

    def _admits(self, now: float) -> bool:
        """Whether one more may begin now; if so, its token is taken."""
        if self.concurrency is not None and self.running >= self.concurrency:
            return False
        return self._bucket is None or self._bucket.take(now)

    def _serve(self) -> None:
        """Give places in order, as many as there are; wake up again where only the rate is in the way."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            place = self._waiting[0][1]
            if not place.done() and not self._admits(loop.time()):
                break
            self._waiting.popleft()
            if not place.done():
                self.running += 1
                place.set_result(None)
        free = self.concurrency is None or self.running < self.concurrency
        if self._waiting and free and self._bucket is not None:
            self._timer = loop.call_later(self._bucket.wait_s(loop.time()), self._serve)


def redo_after_s(tries: int) -> float:
    """Seconds until a judge that failed so many times in a row is asked again."""
    return min(_REDO_CAP_S, _REDO_S * 2.0 ** min(tries - 1, 10))


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
