"""One sample in the hands of one task; what a run works with; and who is told what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollout_svc.agent import AgentContext, EngineCaller
from rollout_svc.buffer.storage import Storage
from rollout_svc.events import EventBus
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.judging import Judging, ProcessRunner
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.sample import Sample
from rollout_svc.sessions.registry import Sessions
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import TaskOwner
from rollout_svc.tokens import TextCodec
from rollout_svc.trajectories import Trajectories

if TYPE_CHECKING:
    from rollout_svc.rollout.run import GroupRun

__all__ = ["Host", "Member", "Owner", "Tools"]


@dataclass(frozen=True, slots=True)
class Tools:
    """What every run uses; made once by the composition root."""

    gate: Gate
    signals: GateSignals
    engines: EngineCaller
    judging: Judging
    storage: Storage
    tasks: TaskOwner
    bus: EventBus
    codec: TextCodec
    tally: Tally
    settling: Settling
    trajectories: Trajectories
    max_attempts: int
    processes: ProcessRunner | None = None  # of synchronous tools
    sessions: Sessions | None = None
    experts: bool = False  # routed experts are kept, where a request's sampling says so too


class Host(Protocol):
    """Who has groups run beside the buffer's, with tools of its own, and gets them back."""

    @property
    def tools(self) -> Tools:
        """What its runs use, counts and storage included."""

    def generation_started(self, group: Group) -> None:
        """A member was handed to its agent loop."""

    def generation_ended(self, group: Group) -> None:
        """Its loop is over, whatever came of it."""

    def run_closed(self, group: Group) -> None:
        """No task has it any more: it is finished, unfinished or settled, as its account says."""


class Owner(Protocol):
    """Who is told what became of a run, and keeps the counts."""

    def generation_started(self, run: GroupRun) -> None:
        """A member was handed to its agent loop."""

    def generation_ended(self, run: GroupRun) -> None:
        """Its loop is over, whatever came of it: there is room for another."""

    def run_changed(self, run: GroupRun) -> None:
        """A member ended or parked."""

    def cancel(self, run: GroupRun, tasks: list[asyncio.Task[Any]]) -> None:
        """End tasks that lost their group, and follow those that do not end."""

    def bug(self, where: str, error: Exception) -> None:
        """Something happened that the code does not provide for."""

    def keeps_partials(self, runtime: TaskRuntime) -> bool:
        """Whether a sample of this task that was cut goes on from the tokens it has."""

    def run_closed(self, run: GroupRun, reason: str) -> None:
        """The run is over; the group's account says how."""


@dataclass(eq=False, slots=True)
class Member:
    """One sample in the hands of one task; times are loop time, `since` that of its attempt."""

    sample: Sample
    attempt: int
    stage: str = "starting"
    since: float = 0.0
    judging_since: float = 0.0
    task: asyncio.Task[None] | None = None
    context: AgentContext | None = None
    counted: bool = False

    @property
    def parked(self) -> bool:
        """No engine and no judge works for it, and its loop goes on by itself after a resume."""
        context = self.context
        if context is None or context.on_pause != "park" or context.calling or self.stage != "generating":
            return False
        return self.task is None or not self.task.done()  # one that has just ended is about to be judged
