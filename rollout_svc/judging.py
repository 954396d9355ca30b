"""What a judger is, and judge calls made cancellable, bounded and off the loop.

A judger is any object with `judge(sample) -> float | Reward`, or `judge_group(samples) -> list` of them, async or
not; it never has to know about pauses, timeouts or threads. A synchronous one that only compares what it is given may
say `instant = True`: it is then called in the loop, where a task and a timer would cost more than the verdict.

Invariants:

- No judge starts while its lane's gate is closed, unless it is closed to wait for what runs; one that waits for its
  turn leaves the queue when it closes.
- The timeout of a call starts when the call starts: queueing is never counted against a judge.
- A call ends for its caller exactly once, whatever the judger does afterwards: a hung or cancelled judge that
  answers later writes nothing.
- A synchronous judger that is not instant runs in a process that can be killed, and is, at its timeout or at a pause.
- A failure is a typed SampleFailure, never a number.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rollout_svc import blame
from rollout_svc.errors import Interrupted, SampleFailure
from rollout_svc.gate import Gate, Lane
from rollout_svc.plugins import PluginSpec
from rollout_svc.segment import FinishReason
from rollout_svc.tasks import TaskOwner

__all__ = [
    "REPORTED",
    "CallClock",
    "JudgeCall",
    "JudgeDesk",
    "JudgedSample",
    "JudgerError",
    "Judging",
    "ProcessRunner",
    "Reward",
    "TimedFuture",
]

REPORTED: Final = "reported_reward"
"""Key of a sample's `meta`: the reward that was told while it was made."""
_SINGLE: Final = "judge"
_GROUP: Final = "judge_group"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and the named parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgedSample:
    """What a judger sees of a sample: values only, so that nothing it does can change the sample."""

    sample_id: str
    group_id: str
    task: str
    prompt: Any
    prompt_ids: list[int]
    response: str | None
    response_ids: list[int]
    ground_truth: Any
    meta: dict[str, Any]
    finish_reason: FinishReason | None
    reported: float | None = None
    """The reward that its environment, or its agent, told; None: neither did."""


class JudgerError(Exception):
    """Raised when a judger failed in its process; the message is the error's own, a note its traceback."""


@dataclass(slots=True)
class CallClock:
    """When a process began a call, and how long it ran; the process runner writes it."""

    begun: float | None = None
    """Seconds, on the loop's clock."""
    run_s: float | None = None


class TimedFuture(asyncio.Future[Any]):
    """A call in a process, and its clock."""

    def __init__(self, clock: CallClock) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.clock = clock


class ProcessRunner(Protocol):
    """Runs a synchronous judger in a process that can be killed."""

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Start it; cancelling the future kills the call, a TimeoutError ends it after `timeout_s` of running.

        The future is a `TimedFuture` where the runner knows when a process began the call.
        """

    async def close(self) -> None:
        """Kill what runs and end the processes; idempotent."""


class JudgeDesk:
    """One task's judger, its limits, and who waits for it."""

    __slots__ = (
        "_judger",
        "_waiting",
        "by_group",
        "concurrency",
        "instant",
        "is_async",
        "name",
        "running",
        "spec",
        "timeout_s",
    )

    def __init__(
        self, *, name: str, judger: Any, spec: PluginSpec, timeout_s: float, concurrency: int | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.by_group = hasattr(judger, _GROUP)
        self.is_async = inspect.iscoroutinefunction(getattr(judger, self.method))
        self.instant = not self.is_async and bool(getattr(judger, "instant", False))
        self.running = 0
        self._judger = judger
        self._waiting: deque[tuple[Lane, asyncio.Future[None]]] = deque()

    @property
    def method(self) -> str:
        """The method this judger is called by."""
        return _GROUP if self.by_group else _SINGLE

    def call(self, payload: Any) -> Any:
        """Make the coroutine of an async judger, or the verdict of an instant one."""
        return getattr(self._judger, self.method)(payload)

    async def enter(self, lane: Lane) -> None:
        """Take a place; waits for one, and raises Interrupted when the lane closes meanwhile."""
        if self.concurrency is None or self.running < self.concurrency:
            self.running += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((lane, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()  # it was given just now, and nobody will use it
            raise

    def leave(self) -> None:
        """Give the place to whoever waits longest, or back: it is never free in between, so nobody overtakes."""
        while self._waiting:
            place = self._waiting.popleft()[1]
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    def turn_away(self, lane: Lane) -> None:
        """End the wait of everyone of this lane: its gate closed."""
        for entry in tuple(self._waiting):
            if entry[0] == lane:
                self._waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_exception(Interrupted("the gate closed before this judge started"))


@dataclass(eq=False, slots=True)
class JudgeCall:
    """A judge call under way."""

    desk: JudgeDesk
    lane: Lane
    sample_ids: tuple[str, ...]
    since: float
    outcome: asyncio.Future[list[Reward]]
    work: asyncio.Future[Any]
    timer: asyncio.TimerHandle | None = None


class Judging:
    """Every judge call under way, and the way to end them."""

    def __init__(self, *, gate: Gate, tasks: TaskOwner, processes: ProcessRunner | None = None) -> None:
        self._gate = gate
        self._tasks = tasks
        self._processes = processes
        self._desks: list[JudgeDesk] = []
        self._calls: dict[JudgeCall, None] = {}
        self._clinging: dict[JudgeCall, None] = {}
        gate.subscribe(self._gate_changed)

    @property
    def calls(self) -> tuple[JudgeCall, ...]:
        """Calls under way, oldest first."""
        return tuple(self._calls)

    @property
    def clinging(self) -> tuple[JudgeCall, ...]:
        """Calls that ended for their caller while the judger still runs, its cancellation swallowed or not yet met."""
        return tuple(self._clinging)

    def pending(self, lanes: Iterable[Lane]) -> int:
        """Number of calls under way in these lanes."""
        wanted = frozenset(lanes)
        return sum(call.lane in wanted for call in self._calls)

    def add_desk(self, desk: JudgeDesk) -> None:
        """Register a task's judger."""
        self._desks.append(desk)

    async def judge(self, desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample]) -> list[Reward]:
        """Judge one sample, or a whole group where the judger is a group judger.

        Returns:
            One reward per sample, in order.

        Raises:
            Interrupted: a pause came first; the samples are judged again later.
            SampleFailure: `judge_timeout`, `judge_error` or `judge_invalid`.
        """
        self._refuse_when_closed(lane)
        if desk.instant:
            return _instant(desk, samples)
        await desk.enter(lane)
        try:
            self._refuse_when_closed(lane)
            call = self._start(desk, lane, samples)
            try:
                return await call.outcome
            finally:
                self._end(call)
        finally:
            desk.leave()

    def interrupt(self, lanes: Iterable[Lane], limit: int) -> int:
        """End up to `limit` calls of these lanes now; returns how many. Call again until it returns 0."""
        wanted = frozenset(lanes)
        chosen = [call for call in self._calls if call.lane in wanted and not call.outcome.done()][:limit]
        for call in chosen:
            call.outcome.set_exception(Interrupted("a pause ended this judge call"))
            call.work.cancel()
        return len(chosen)

    def _refuse_when_closed(self, lane: Lane) -> None:
        if not self._gate.may_finish(lane):
            raise Interrupted("the gate is closed: no judge starts")

    def _gate_changed(self, lane: Lane) -> None:
        if not self._gate.may_finish(lane):
            for desk in self._desks:
                desk.turn_away(lane)

    def _start(self, desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample]) -> JudgeCall:
        loop = asyncio.get_running_loop()
        ids = tuple(sample.sample_id for sample in samples)
        payload: Any = list(samples) if desk.by_group else samples[0]
        outcome: asyncio.Future[list[Reward]] = loop.create_future()
        work: asyncio.Future[Any]
        timer = None
        if desk.is_async:
            work = self._tasks.spawn(f"judge:{ids[0]}", _without_exit(desk.call(payload)), handled=True)
            timer = loop.call_later(desk.timeout_s, _time_out, outcome, work, desk)
        elif self._processes is None:
            raise SampleFailure("judge_error", f"{desk.name}: no process to run a synchronous judger in")
        else:
            try:
                work = self._processes.submit(desk.spec, desk.method, payload, desk.timeout_s)
            except Exception as error:
                message = f"{desk.name}: no process could take it: {type(error).__name__}: {error}"
                raise SampleFailure("judge_error", message) from error
        call = JudgeCall(desk, lane, ids, loop.time(), outcome, work, timer)
        self._calls[call] = None
        work.add_done_callback(lambda done: _deliver(call, done, len(samples)))
        return call

    def _end(self, call: JudgeCall) -> None:
        self._calls.pop(call, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.work.done():
            call.work.cancel()
            self._clinging[call] = None
            call.work.add_done_callback(lambda _: self._clinging.pop(call, None))
        if not call.outcome.done():
            call.outcome.cancel()


def _instant(desk: JudgeDesk, samples: Sequence[JudgedSample]) -> list[Reward]:
    try:
        verdict = desk.call(list(samples) if desk.by_group else samples[0])
    except (Exception, SystemExit) as error:
        raise _failure(desk, error) from error
    return _rewards(verdict, desk, len(samples))


async def _without_exit(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a judger; the loop would end the whole service for one that exits."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"it called exit({error})") from error


def _time_out(outcome: asyncio.Future[list[Reward]], work: asyncio.Future[Any], desk: JudgeDesk) -> None:
    if not outcome.done():
        outcome.set_exception(SampleFailure("judge_timeout", f"{desk.name}: no verdict in {desk.timeout_s:g} s"))
        work.cancel()


def _deliver(call: JudgeCall, work: asyncio.Future[Any], expected: int) -> None:
    """Carry the judger's result over, once; a result after the outcome is fixed changes nothing."""
    error = None if work.cancelled() else work.exception()
    if call.outcome.done():
        return
    try:
        call.outcome.set_result(_verdict(call.desk, work, error, expected))
    except SampleFailure as failure:
        call.outcome.set_exception(failure)


def _verdict(desk: JudgeDesk, work: asyncio.Future[Any], error: BaseException | None, expected: int) -> list[Reward]:
    if work.cancelled():
        raise SampleFailure("judge_error", f"{desk.name}: the judger cancelled itself")
    if isinstance(error, TimeoutError) and not desk.is_async:
        raise SampleFailure("judge_timeout", f"{desk.name}: {error}")
    if error is not None:
        raise _failure(desk, error) from error
    return _rewards(work.result(), desk, expected)


def _failure(desk: JudgeDesk, error: BaseException) -> SampleFailure:
    """Tell what a judger raised, and where in its code; one from a process was told there."""
    told = str(error) if isinstance(error, JudgerError) else blame.told(error)[0]
    return SampleFailure("judge_error", f"{desk.name}: {told}")


def _rewards(result: Any, desk: JudgeDesk, expected: int) -> list[Reward]:
    try:
        return _checked(result, desk, expected)
    except SampleFailure:
        raise
    except Exception as error:  # an object of the judger's making that fails when it is looked at
        raise _failure(desk, error) from error


def _checked(result: Any, desk: JudgeDesk, expected: int) -> list[Reward]:
    values = result if desk.by_group else [result]
    if not isinstance(values, list) or len(values) != expected:
        raise SampleFailure("judge_invalid", f"{desk.name}: expected a list of {expected} rewards, got {result!r:.200}")
    return [_reward(value, desk) for value in values]


def _reward(value: Any, desk: JudgeDesk) -> Reward:
    reward = value if isinstance(value, Reward) else Reward(value)
    number = reward.value
    if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
        raise SampleFailure("judge_invalid", f"{desk.name}: a reward is a finite number, not {value!r:.200}")
    return reward if type(number) is float else Reward(float(number), reward.parts)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int that no float can hold
        return False
