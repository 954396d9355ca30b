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
- A failure is a typed SampleFailure, never a number; where its desk says so, the judge is asked again first.
- A judger that asks others is one judge: they end with it, and each keeps its own limits, timeout and process. Its
  timeout is for what it does by itself: their work and queueing are not counted against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, Final

from rollout_svc import blame
from rollout_svc.errors import Interrupted, JudgeFailed, SampleFailure
from rollout_svc.gate import LANES, Gate, Lane
from rollout_svc.judging.desk import JudgeDesk
from rollout_svc.judging.own_time import OwnTime
from rollout_svc.judging.values import (
    JudgeCall,
    JudgedSample,
    JudgerError,
    ProcessRunner,
    Reward,
)
from rollout_svc.real import as_real
from rollout_svc.tasks import TaskOwner

__all__ = ["Judging"]

_WITHIN: Final[ContextVar[tuple[Lane, OwnTime]]] = ContextVar("lane and own time of the judge call that asks others")


class Judging:
    """Every judge call under way, and the way to end them."""

    def __init__(self, *, gate: Gate, tasks: TaskOwner, processes: ProcessRunner | None = None) -> None:
        self._gate = gate
        self._tasks = tasks
        self._processes = processes
        self._desks: list[JudgeDesk] = []
        self._calls: dict[JudgeCall, None] = {}
        self._pending: dict[Lane, int] = dict.fromkeys(LANES, 0)  # how many of them, by lane
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
        return sum(self._pending[lane] for lane in frozenset(lanes))

    def add_desk(self, desk: JudgeDesk) -> None:
        """Register a task's judger, and those it asks."""
        same = next((other.figures for other in self._desks if other.name == desk.name), desk.figures)
        desk.figures = same
        self._desks.append(desk)
        self._seat(desk)

    def _seat(self, desk: JudgeDesk) -> None:
        for part in desk.parts.values():
            self._seat(part)
        if desk.parts:
            desk.seat(partial(self._ask, desk))

    async def close(self) -> None:
        """Have every judger give back what it holds; one that fails to does not keep the others from it."""
        every = [desk for top in self._desks for desk in (top, *top.below())]
        await asyncio.gather(*(desk.close() for desk in every), return_exceptions=True)

    def as_json(self) -> dict[str, Any]:
        """What each judger costs, by its name."""
        found: dict[str, Any] = {}
        for name, figures in {desk.name: desk.figures for desk in self._desks}.items():
            begun = [call.begun is not None for call in self._calls if call.desk.name == name]
            queued = sum(desk.queued for desk in self._desks if desk.name == name)
            found[name] = figures.as_json(running=sum(begun), waiting=queued + len(begun) - sum(begun))
        return found

    async def judge(self, desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample]) -> list[Reward]:
        """Judge one sample, or a whole group where the judger is a group judger.

        Returns:
            One reward per sample, in order.

        Raises:
            Interrupted: a pause came first; the samples are judged again later.
            SampleFailure: `judge_timeout`, `judge_error` or `judge_invalid`.
        """
        self._refuse_when_closed(lane)
        if desk.at_once and not desk.redos:
            return _instant(desk, samples)
        asked = asyncio.get_running_loop().time()
        return await self._repeat(desk, lane, samples, asked, part=False)

    async def _ask(self, whole: JudgeDesk, name: str, sample: JudgedSample) -> Reward:
        """Have a part judge, within a call of the whole: it is the same judge, so no gate is looked at again."""
        asked = asyncio.get_running_loop().time()
        lane, own = _WITHIN.get()
        try:
            with own.asking():
                [reward] = await self._repeat(whole.parts[name], lane, [sample], asked, part=True)
        except SampleFailure as failure:
            raise SampleFailure(failure.reason, f"{name}: {failure.message}") from failure
        return reward

    async def _repeat(
        self, desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample], asked: float, *, part: bool
    ) -> list[Reward]:
        tries = 1
        while True:
            try:
                return await self._once(desk, lane, samples, asked, part=part)
            except SampleFailure:
                if tries > desk.redos:
                    raise
            await desk.rest(lane, tries)
            tries += 1
            asked = asyncio.get_running_loop().time()

    async def _once(
        self, desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample], asked: float, *, part: bool
    ) -> list[Reward]:
        if not part:
            self._refuse_when_closed(lane)
        await desk.enter(lane)
        try:
            if not part:
                self._refuse_when_closed(lane)
            if desk.instant:
                return _instant(desk, samples)
            call = self._start(desk, lane, samples)
            call.asked = asked
            if not part:
                self._calls[call] = None
                self._pending[lane] += 1
            try:
                return await call.outcome
            finally:
                _count(call)
                self._end(call)
        finally:
            desk.leave()

    @staticmethod
    def work_of(
        desk: JudgeDesk, lane: Lane, samples: Sequence[JudgedSample], own: OwnTime | None = None
    ) -> Coroutine[Any, Any, Any]:
        """What the task of one call of an asynchronous judger runs; `own`: the time of one that asks others."""
        work = desk.call(list(samples) if desk.by_group else samples[0])
        if desk.parts:
            work = _within(work, lane, own or OwnTime(desk.timeout_s, lambda: None))
        return _without_exit(work)

    def interrupt(self, lanes: Iterable[Lane], limit: int) -> int:
        """End up to `limit` calls of these lanes now; returns how many. Call again until it returns 0."""
        wanted = frozenset(lanes)
        chosen = list(islice((c for c in self._calls if c.lane in wanted and not c.outcome.done()), limit))
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
        outcome: asyncio.Future[list[Reward]] = loop.create_future()
        work: asyncio.Future[Any]
        timer: asyncio.TimerHandle | OwnTime | None = None
        if desk.parts:
            timer = OwnTime(desk.timeout_s, lambda: _time_out(outcome, work, desk))
            work = self._tasks.spawn(f"judge:{ids[0]}", self.work_of(desk, lane, samples, timer), handled=True)
        elif desk.is_async:
            work = self._tasks.spawn(f"judge:{ids[0]}", self.work_of(desk, lane, samples), handled=True)
            timer = loop.call_later(desk.timeout_s, _time_out, outcome, work, desk)
        elif self._processes is None:
            raise SampleFailure("judge_error", f"{desk.name}: no process to run a synchronous judger in")
        else:
            payload: Any = list(samples) if desk.by_group else samples[0]
            try:
                work = self._processes.submit(desk.spec, desk.method, payload, desk.timeout_s)
            except Exception as error:
                message = f"{desk.name}: no process could take it: {type(error).__name__}: {error}"
                raise SampleFailure("judge_error", message) from error
        call = JudgeCall(desk, lane, ids, loop.time(), outcome, work, timer)
        work.add_done_callback(lambda done: _deliver(call, done, len(samples)))
        return call

    def _end(self, call: JudgeCall) -> None:
        if call in self._calls:
            del self._calls[call]
            self._pending[call.lane] -= 1
        if call.timer is not None:
            call.timer.cancel()
        if not call.work.done():
            call.work.cancel()
            self._clinging[call] = None
            call.work.add_done_callback(lambda _: self._clinging.pop(call, None))
        if not call.outcome.done():
            call.outcome.cancel()


def _count(call: JudgeCall) -> None:
    """Put a call that ends into its judger's figures; one that was cut short is only counted."""
    figures = call.desk.figures
    error = None if not call.outcome.done() or call.outcome.cancelled() else call.outcome.exception()
    if not call.outcome.done() or call.outcome.cancelled() or isinstance(error, Interrupted):
        figures.interrupted += 1
        return
    now = asyncio.get_running_loop().time()
    queue_s = max(0.0, (now if call.begun is None else call.begun) - call.asked)
    failed = error.reason if isinstance(error, SampleFailure) else None
    figures.ended(call.sample_ids[0], queue_s, call.run_s(now), failed)


def _instant(desk: JudgeDesk, samples: Sequence[JudgedSample]) -> list[Reward]:
    try:
        rewards = _asked_at_once(desk, samples)
    except SampleFailure as failure:
        desk.figures.failed[failure.reason] += 1
        raise
    desk.figures.judged += 1
    return rewards


def _asked_at_once(desk: JudgeDesk, samples: Sequence[JudgedSample]) -> list[Reward]:
    try:
        with blame.contained():
            verdict = desk.call(list(samples) if desk.by_group else samples[0])
    except Exception as error:
        raise _failure(desk, error) from error
    return _rewards(verdict, desk, len(samples))


async def _within(work: Coroutine[Any, Any, Any], lane: Lane, own: OwnTime) -> Any:
    """Run a judger that asks others."""
    _WITHIN.set((lane, own))  # of this task, and of those that the judger makes
    return await work


async def _without_exit(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a judger; the loop would end the whole service for one that exits."""
    with blame.contained():
        return await work


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
        raise SampleFailure("judge_timeout", f"{desk.name}: no verdict in {desk.timeout_s:g} s {error}".strip())
    if error is not None:
        raise _failure(desk, error) from error
    return _rewards(work.result(), desk, expected)


def _failure(desk: JudgeDesk, error: BaseException) -> SampleFailure:
    """Tell what a judger raised, and where in its code; one from a process was told there."""
    if desk.parts and isinstance(error, SampleFailure):
        return SampleFailure(error.reason, f"{desk.name}: {error.message}")
    told = str(error) if isinstance(error, JudgerError | JudgeFailed) else blame.told(error)[0]
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
    if isinstance(value, JudgeFailed):
        raise value  # returned as it is, from another process or by a judger's own choice
    reward = value if isinstance(value, Reward) else Reward(value)
    number, parts = as_real(reward.value), reward.parts
    if number is None:
        raise SampleFailure("judge_invalid", f"{desk.name}: a reward is a finite number, not {value!r:.200}")
    told = {name: as_real(part) for name, part in parts.items()} if isinstance(parts, dict) else {"": None}
    if not all(type(name) is str and part is not None for name, part in told.items()):
        message = f"{desk.name}: the parts of a reward are finite numbers by name, not {parts!r:.200}"
        raise SampleFailure("judge_invalid", message)
    return Reward(number, {name: part for name, part in told.items() if part is not None})
