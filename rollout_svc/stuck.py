"""Who is stuck: where every sample under way is, since when, and what its task waits for.

Invariants:

- Where a sample is, is found out here alone: `GET /v1/stuck`, the command, the signal and a take that cannot be met
  say the same.
- Reading changes nothing. It costs a pass of look-ups over what is under way; records and await chains are made for
  the oldest only, so that it can be asked with thousands in flight.
- Whatever a sample waits for, it is somewhere: `counts` adds up to all that are older than was asked for.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

from rollout_svc.agent import AgentContext
from rollout_svc.assembly import Parts
from rollout_svc.await_chain import await_chain, links
from rollout_svc.engines import HttpTransport
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES, Lane
from rollout_svc.group import Group
from rollout_svc.judging import JudgeCall
from rollout_svc.rollout.member import Member
from rollout_svc.rollout.run import GroupRun
from rollout_svc.sample import Sample
from rollout_svc.workers.line import Wait
from rollout_svc.workers.worker import EngineCall, Worker

__all__ = ["MOST_CHAINS", "MOST_LISTED", "Place", "describe_stuck", "oldest_samples"]

MOST_LISTED: Final = 1000
"""Most samples, and most groups, of one answer; the others are counted."""
MOST_CHAINS: Final = 256
"""Most samples, the oldest, whose await chains are read: that takes longer than all the rest."""

Place = Literal[
    "starting",  # its task has not run yet
    "queued",  # in line for a worker's slot
    "retrying",  # between two tries
    "connecting",  # dispatched, and no connection yet; an engine that connects and reads nothing looks like generating
    "generating",
    "frozen",  # likewise, at an engine that a pause holds still
    "in_agent",  # in its loop's own code, of a loop that does not park
    "parked",  # the same of one that does, or at the gate
    "waiting_for_judge",  # generated; in line for its judger
    "judging",
    "waiting_for_siblings",  # done for now, no task has it
    "putting",
    "straggler",  # a task that outlived its group: fenced, and still here
    "clinging_judge",  # a judger that runs on although its call ended
]


class _Standing(NamedTuple):
    """Where a sample is; times are loop time.

    Attributes:
        since: since when it is there.
        taken_at: since when a task has had it in this attempt; where none has it, as `since`.
        tasks: what it waits for, in the order of waiting.
        quiet: it has a session, and no turn of it is under way.
    """

    sample_id: str
    where: Place
    since: float
    taken_at: float
    sample: Sample | None = None
    group: Group | None = None
    attempt: int | None = None
    worker: str | None = None
    judger: str | None = None
    tasks: tuple[asyncio.Future[Any] | None, ...] = ()
    lane: Lane | None = None
    quiet: bool = False


class _Scene:
    """What the parts know of samples under way, by sample id: read once, then looked up."""

    __slots__ = ("calls", "connecting", "judges", "sessions", "waits")

    def __init__(self, parts: Parts) -> None:
        self.calls: dict[str, tuple[Worker, EngineCall]] = {
            call.sample_id: (worker, call) for worker in parts.pool.workers.values() for call in worker.calls.values()
        }
        self.judges: dict[str, JudgeCall] = {
            sample_id: call for call in parts.judging.calls for sample_id in call.sample_ids
        }
        self.waits: dict[str, Wait] = parts.pool.line.waits
        self.sessions = parts.sessions
        transport = parts.transport
        self.connecting = transport.connecting if isinstance(transport, HttpTransport) else frozenset[Any]()

    def of_run(self, run: GroupRun) -> Iterator[_Standing]:
        """Say where the samples of a group under way are."""
        members = run.members
        judge = next((m for m in members.values() if m.stage == "judging"), None) if run.runtime.desk.by_group else None
        for sample in run.group.samples:
            if sample.settled:
                continue
            member = members.get(sample.sample_id) or judge
            if run.putting is not None:
                ended = max(member.since for member in run.group.samples)
                yield self._idle(run, sample, "putting", ended, run.putting)
            elif member is None:
                yield self._idle(run, sample, "waiting_for_siblings", sample.since, None)
            else:
                yield self._held(run, sample, member)

    @staticmethod
    def _idle(run: GroupRun, sample: Sample, where: Place, since: float, task: asyncio.Task[None] | None) -> _Standing:
        return _Standing(sample.sample_id, where, since, since, sample, run.group, sample.attempt, tasks=(task,))

    def _held(self, run: GroupRun, sample: Sample, member: Member) -> _Standing:
        """Say where a sample is that a task has."""
        worker = judger = session = turn = None
        tasks: tuple[asyncio.Future[Any] | None, ...] = (member.task,)
        where: Place
        if member.stage == "judging":
            judger = run.runtime.desk.name
            judge = self.judges.get(sample.sample_id)
            where = "waiting_for_judge" if judge is None or judge.begun is None else "judging"
            since = max(member.since, member.judging_since) if judge is None else judge.begun or judge.since
            tasks = tasks if judge is None else (member.task, judge.work)
        elif member.stage == "starting" or member.context is None:
            where, since = "starting", member.since
        else:
            where, since, worker = self._generating(sample, member, member.context)
            if (session := self.sessions.of_sample(sample.sample_id)) is not None:
                since, turn = max(since, session.last_used), self.sessions.turn_of(session)
                tasks = tasks if turn is None else (member.task, turn)
        return _Standing(
            *(sample.sample_id, where, since, member.since, sample, run.group, member.attempt, worker, judger, tasks),
            quiet=session is not None and turn is None,
        )

    def _generating(self, sample: Sample, member: Member, context: AgentContext) -> tuple[Place, float, str | None]:
        """Say where a sample is whose agent loop runs, and at which worker."""
        if sample.sample_id in self.calls:
            worker, call = self.calls[sample.sample_id]
            return self._at_engine(worker, call), call.since, worker.worker_id
        if sample.sample_id in self.waits:
            wait = self.waits[sample.sample_id]
            return wait.where, wait.since, None
        since = max(member.since, context.since)
        if context.calling:  # it has its answer, or its turn in line, and has not run since
            return "generating", since, None
        return "parked" if member.parked else "in_agent", since, None

    def _at_engine(self, worker: Worker, call: EngineCall) -> Place:
        if worker.frozen:
            return "frozen"
        return "connecting" if call.task in self.connecting else "generating"

    def elsewhere(self, runs: Iterable[GroupRun]) -> Iterator[_Standing]:
        """Say where the samples are that no run has: requests of whoever uses the engines without a buffer."""
        known = {run.group.group_id for run in runs}
        for sample_id, (worker, call) in self.calls.items():
            if _group_of(sample_id) not in known:
                where = self._at_engine(worker, call)
                yield _Standing(
                    sample_id,
                    where,
                    call.since,
                    call.since,
                    worker=worker.worker_id,
                    lane=call.lane,
                    tasks=(call.task,),
                )


def _standings(parts: Parts) -> Iterator[_Standing]:
    """Say where everything is that is under way, in every lane."""
    scene, runs = _Scene(parts), parts.rollouts.runs(LANES)
    for run in runs:
        yield from scene.of_run(run)
    yield from scene.elsewhere(runs)
    known = {run.group.group_id: run.group for run in runs}
    known |= {group.group_id: group for group in _unfinished(parts)}
    for task, straggler in parts.rollouts.straggling:
        group = known.get(_group_of(straggler.sample_id))
        yield _Standing(straggler.sample_id, "straggler", straggler.since, straggler.since, group=group, tasks=(task,))
    for call in parts.judging.clinging:
        for sample_id in call.sample_ids:
            yield _Standing(
                sample_id,
                "clinging_judge",
                call.since,
                call.since,
                group=known.get(_group_of(sample_id)),
                judger=call.desk.name,
                tasks=(call.work,),
            )


def _unfinished(parts: Parts) -> list[Group]:
    """Groups that no task has, and that are to go on: the buffer's, and those of evaluations."""
    return [*parts.buffer.unfinished_groups(), *parts.evaluations.unfinished_groups()]


def _group_of(sample_id: str) -> str:
    return sample_id.rpartition(".")[0]


def _record(standing: _Standing, now: float, *, chain: bool) -> dict[str, Any]:
    sample, group = standing.sample, standing.group
    return {
        "sample_id": standing.sample_id,
        "group_id": _group_of(standing.sample_id),
        "task": None if group is None else group.prompt.task,
        "lane": standing.lane if group is None else group.lane,
        "status": None if sample is None else str(sample.status),
        "where": standing.where,
        "at": _parked_at(standing) if chain else None,
        "worker": standing.worker,
        "judger": standing.judger,
        "since_s": round(max(0.0, now - standing.since), 3),
        "age_s": round(max(0.0, now - standing.taken_at), 3),
        "attempt": standing.attempt,
        "tokens": None if sample is None else sample.response_length,
        "awaits": await_chain(*standing.tasks) if chain else None,
    }


def _parked_at(standing: _Standing) -> Literal["gate", "tool", "client"] | None:
    """Where its loop is while no engine works for it: waiting to go on, in its own code, or in that of a client."""
    if standing.where not in ("parked", "in_agent"):
        return None
    if standing.quiet:
        return "client"
    # Their frames, on the chain, are the one sign of it.
    at_gate = (AgentContext._park.__code__, AgentContext.may_speak.__code__)  # noqa: SLF001
    chain = (link for task in standing.tasks if task is not None for link in links(task))
    return "gate" if any(isinstance(link, FrameType) and link.f_code in at_gate for link in chain) else "tool"


def oldest_samples(
    parts: Parts, count: int, lanes: Iterable[Lane] = LANES, among: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """The samples that a task has had for longest; those that wait for their siblings come after all others.

    Args:
        parts: of the service.
        count: how many at most.
        lanes: of these.
        among: ids of the groups to look at; None: all that are under way.
    """
    wanted = frozenset(lanes)
    standings = heapq.nsmallest(
        count,
        (
            found
            for found in _standings(parts)
            if (found.lane if found.group is None else found.group.lane) in {None, *wanted}
            and (among is None or _group_of(found.sample_id) in among)
        ),
        key=lambda found: (found.where == "waiting_for_siblings", found.taken_at),
    )
    now = asyncio.get_running_loop().time()
    return [_record(found, now, chain=True) for found in standings]


def describe_stuck(parts: Parts, older_than_s: float) -> dict[str, Any]:
    """The record of `GET /v1/stuck`: what has been under way for longer than that, oldest first.

    Raises:
        BadRequest: `older_than_s` is no number from 0 on.
    """
    if not (math.isfinite(older_than_s) and older_than_s >= 0):
        raise BadRequest.at("older_than_s", "expected a finite number, 0 or greater")
    now = asyncio.get_running_loop().time()
    limit = now - older_than_s
    older = [standing for standing in _standings(parts) if standing.taken_at <= limit]
    groups = [group for group in _unfinished(parts) if group.handed_back_at <= limit]
    listed = heapq.nsmallest(MOST_LISTED, older, key=lambda standing: standing.taken_at)
    listed_groups = heapq.nsmallest(MOST_LISTED, groups, key=lambda group: group.handed_back_at)
    return {
        "older_than_s": older_than_s,
        "counts": dict(Counter(standing.where for standing in older)),
        "samples": [_record(found, now, chain=place < MOST_CHAINS) for place, found in enumerate(listed)],
        "groups": [_buffered(parts, group, now) for group in listed_groups],
        "omitted": len(older) - len(listed),
        "groups_omitted": len(groups) - len(listed_groups),
    }


def _buffered(parts: Parts, group: Group, now: float) -> dict[str, Any]:
    """The record of an unfinished group in the buffer: no task has it, and why."""
    return {
        "group_id": group.group_id,
        "task": group.prompt.task,
        "lane": group.lane,
        "where": "buffered",
        "reason": _why_buffered(parts, group.lane, group.not_before, now),
        "rests_s": round(max(0.0, group.not_before - now), 3),
        "since_s": round(max(0.0, now - group.handed_back_at), 3),
        "hand_backs": group.hand_backs,
        "samples": dict(Counter(str(sample.status) for sample in group.samples)),
    }


def _why_buffered(parts: Parts, lane: Lane, not_before: float, now: float) -> str:
    """`gate_closed`, `resting` (until `rests_s` from now), what the producer waits for, or `next`: it goes on now."""
    if not parts.gate.is_open(lane):
        return "gate_closed"
    if not_before > now:
        return "resting"
    if not parts.pool.in_traffic:
        return "no_worker"
    return "target_reached" if lane == "train" and parts.producer.waiting == "target_reached" else "next"
