"""What a judger is given and what it answers; how a judge call is told of; who runs synchronous ones.

Invariant: values and protocols; nothing here does anything, but for bringing a verdict into a form that can cross.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rollout_svc.gate import Lane
from rollout_svc.judging.desk import JudgeDesk
from rollout_svc.judging.own_time import OwnTime
from rollout_svc.plugins import PluginSpec
from rollout_svc.real import unwrapped
from rollout_svc.segment import FinishReason

__all__ = [
    "REPORTED",
    "Ask",
    "CallClock",
    "JudgeCall",
    "JudgedSample",
    "JudgerError",
    "ProcessRunner",
    "Reward",
    "TimedFuture",
    "plain",
]

REPORTED: Final = "reported_reward"
"""Key of a sample's `meta`: the reward that was told while it was made."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and the named parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


def plain(verdict: Any) -> Any:
    """A verdict as it crosses to another process: what it would have to import to read it is unwrapped."""
    if type(verdict) is list:
        return [plain(one) for one in verdict]
    if type(verdict) is Reward:
        parts: Any = verdict.parts
        parts = {name: unwrapped(part) for name, part in parts.items()} if isinstance(parts, dict) else parts
        return Reward(unwrapped(verdict.value), parts)
    return unwrapped(verdict)


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


class Ask(Protocol):
    """How a judger that is made of others has one of them judge."""

    async def __call__(self, name: str, sample: JudgedSample) -> Reward:
        """Return the reward of the part of that name; raises SampleFailure, which the judger lets pass."""


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

        The error says where it was, as `(file:line)`, or nothing: in how long it had to be done, its caller knows.

        The future is a `TimedFuture` where the runner knows when a process began the call.
        """

    async def close(self) -> None:
        """Kill what runs and end the processes; idempotent."""


@dataclass(eq=False, slots=True)
class JudgeCall:
    """A judge call under way."""

    desk: JudgeDesk
    lane: Lane
    sample_ids: tuple[str, ...]
    since: float
    outcome: asyncio.Future[list[Reward]]
    work: asyncio.Future[Any]
    timer: asyncio.TimerHandle | OwnTime | None = None
    asked: float = 0.0
    """When it was asked for; `since`: when it had its judger's place."""

    @property
    def begun(self) -> float | None:
        """When it began to run; None while it waits for a process."""
        return self.work.clock.begun if isinstance(self.work, TimedFuture) else self.since

    def run_s(self, now: float) -> float:
        """Seconds it ran so far, or in all where a process said so."""
        if isinstance(self.work, TimedFuture) and self.work.clock.run_s is not None:
            return self.work.clock.run_s
        return 0.0 if self.begun is None else now - self.begun
