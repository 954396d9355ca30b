"""All group runs: what is under way, and how to take it back.

Invariants:

- `generating` counts the buffer's members inside their agent loop; the producer's target is measured by it.
- What a host has started goes back to that host, and touches neither the buffer nor its counts.
- A run is here from its start until it closed and its last task ended; a task that outlives its run is a straggler,
  listed until it ends.
- A task that lost its group while its lane is frozen is cancelled when the lane moves on: a frozen engine cannot drop
  its request, which has to stay counted there.
- When a lane opens, runs that were kept over the pause by a parked member launch their other members again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.events import ComponentDied, GroupFinished, GroupHandedBack
from rollout_svc.gate import LANES, Lane
from rollout_svc.group import Group, Settlement
from rollout_svc.rollout.member import Host, Member, Tools
from rollout_svc.rollout.run import GroupRun
from rollout_svc.rollout.runtime import TaskRuntime

__all__ = ["Rollouts", "Straggler"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A task that still runs although its group was taken back; `since` is loop time, seconds."""

    sample_id: str
    since: float


class Rollouts:
    """The runs of the buffer's groups, and of those that a host brings."""

    def __init__(self, *, tools: Tools, buffer: ReplayBuffer) -> None:
        self.generating = 0
        self.on_room: Callable[[], None] = lambda: None
        self.partials_usable = True
        self._tools = tools
        self._buffer = buffer
        self._runs: dict[str, GroupRun] = {}
        self._parking: dict[str, GroupRun] = {}  # those of them whose members may be parked
        self._stragglers: dict[asyncio.Task[None], Straggler] = {}
        self._frozen: dict[Lane, list[asyncio.Task[None]]] = {lane: [] for lane in LANES}
        self._listeners: list[Callable[[], None]] = []
        tools.gate.subscribe(self._gate_changed)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever a run or a member changed."""
        self._listeners.append(listener)

    def start(self, group: Group, runtime: TaskRuntime, host: Host | None = None) -> None:
        """Run a group, the buffer's or a host's; the caller has looked at the gate in this very step."""
        run = GroupRun(group, runtime, self._tools if host is None else host.tools, self, host)
        self._runs[group.group_id] = run
        if runtime.on_pause == "park":
            self._parking[group.group_id] = run
        run.start()

    def end(self, group: Group, outcome: Settlement, reason: str) -> None:
        """Settle a group that may be running, and take it from its tasks; whoever had it run is told."""
        run = self._runs.get(group.group_id)
        if run is not None:
            run.end(outcome, reason)

    # -- the pause's view ------------------------------------------------------------------------------------

    def runs(self, lanes: Iterable[Lane]) -> list[GroupRun]:
        """Open runs of these lanes."""
        wanted = frozenset(lanes)
        return [run for run in self._runs.values() if run.group.lane in wanted]

    def members(self, lanes: Iterable[Lane]) -> list[Member]:
        """Members with a live task."""
        return [member for run in self.runs(lanes) for member in run.members.values()]

    def parked(self, lanes: Iterable[Lane]) -> list[Member]:
        """Members whose loop waits, or works in its own tool, without an engine or a judge."""
        wanted = frozenset(lanes)
        runs = [run for run in self._parking.values() if run.group.lane in wanted]
        return [member for run in runs for member in run.members.values() if member.parked]

    def busy(self, lanes: Iterable[Lane]) -> bool:
        """Whether a member still has to end, or a put is under way; the first that is found is enough."""
        wanted = frozenset(lanes)
        return any(run.group.lane in wanted and _is_busy(run) for run in self._runs.values())

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Tasks that outlived their run: fenced, and still here."""
        return tuple(self._stragglers.values())

    @property
    def straggling(self) -> tuple[tuple[asyncio.Task[None], Straggler], ...]:
        """The same with their tasks."""
        return tuple(self._stragglers.items())

    def hand_back(self, runs: Iterator[GroupRun], limit: int) -> list[asyncio.Task[None]]:
        """Take back runs that are not merely parked, until `limit` tasks are; returns those tasks, cancelled.

        Args:
            runs: as `runs` gave them, some time ago; those that were looked at are gone from it.
            limit: tasks.
        """
        cancelled: list[asyncio.Task[None]] = []
        while len(cancelled) < limit and (run := next(runs, None)) is not None:
            if run.closed or (run.putting is None and all(member.parked for member in run.members.values())):
                continue
            kept = any(member.parked for member in run.members.values())
            started = _started(run)
            tasks = run.hand_back_stuck() if kept else run.hand_back("pause")
            self._end(tasks, started, run)
            cancelled += tasks
        return cancelled

    def rest(self, lanes: Iterable[Lane]) -> None:
        """A pause is over: members that wait for a parked sibling wait as aborted, until the lane opens."""
        for run in self.runs(lanes):
            run.rest()

    def _end(self, tasks: list[asyncio.Task[None]], started: dict[Any, Straggler], run: GroupRun) -> None:
        current, lane = asyncio.current_task(), run.group.lane
        for task in tasks:
            if task is current or task.done():
                continue
            if self._tools.gate.mode(lane) == "keep":
                self._frozen[lane].append(task)
            else:
                task.cancel()
            self._stragglers[task] = started.get(task, Straggler(run.group.samples[0].sample_id, run.group.created_at))
            task.add_done_callback(lambda done: self._stragglers.pop(done, None))

    def let_go(self, by: str) -> None:
        """The service has stopped: release what heavy things groups still have, running, waiting or lent."""
        leased = [group for lease in self._buffer.leases for group in lease.groups]
        runs = [run.group for run in self._runs.values()]
        for group in (*runs, *self._buffer.unfinished_groups(), *self._buffer.ready_groups(), *leased):
            for sample in group.samples:
                sample.let_go(by)

    # -- the runs' view --------------------------------------------------------------------------------------

    def generation_started(self, run: GroupRun) -> None:
        """Count a member in its agent loop."""
        if run.host is not None:
            run.host.generation_started(run.group)
        else:
            self.generating += 1

    def generation_ended(self, run: GroupRun) -> None:
        """There is room for another: the producer looks at the count, and nobody else has to know."""
        if run.host is not None:
            run.host.generation_ended(run.group)
        else:
            self.generating -= 1
            self.on_room()

    def run_changed(self, run: GroupRun) -> None:  # noqa: ARG002 - one listener serves all runs
        """A member ended or parked: the producer may start more, the ladder counts less."""
        self._notify()

    def cancel(self, run: GroupRun, tasks: list[asyncio.Task[None]]) -> None:
        """End tasks that lost their group; those that do not end are stragglers."""
        self._end(tasks, _started(run), run)

    def bug(self, where: str, error: Exception) -> None:
        """Tell the world; the sample's failure is counted by its run."""
        self._tools.bus.emit(ComponentDied.of(where, error))

    def keeps_partials(self, runtime: TaskRuntime) -> bool:
        """Whether a sample of this task that was cut goes on from the tokens it has."""
        return self.partials_usable if runtime.partial is None else runtime.partial

    def run_closed(self, run: GroupRun, reason: str) -> None:
        """Put the group where its account says."""
        group = run.group
        del self._runs[group.group_id]
        self._parking.pop(group.group_id, None)
        if group.account == "aborted":
            group.handed_back_at = asyncio.get_running_loop().time()
        task, bus = group.prompt.task, self._tools.bus
        if run.host is not None:
            run.host.run_closed(group)
        elif group.account == "ready":
            bus.emit(GroupFinished(group.group_id, task, (group.ready_at or 0.0) - group.created_at))
            self._buffer.put_ready(group)
        elif group.account == "aborted":
            bus.emit(GroupHandedBack(group.group_id, task, reason))
            self._buffer.put_back(group)
        else:
            self._tools.settling.announce(group)
            self._buffer.changed()  # there is room for another group, and a take may have become hopeless
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _gate_changed(self, lane: Lane) -> None:
        if self._tools.gate.mode(lane) != "keep":
            frozen, self._frozen[lane] = self._frozen[lane], []
            for task in frozen:
                task.cancel()
        if self._tools.gate.is_open(lane):
            for run in self.runs((lane,)):
                run.launch()


def _is_busy(run: GroupRun) -> bool:
    return run.putting is not None or any(not member.parked for member in run.members.values())


def _started(run: GroupRun) -> dict[Any, Straggler]:
    return {member.task: Straggler(member.sample.sample_id, member.since) for member in run.members.values()}
