"""One group under way: run its agent loops, judge their answers, settle it.

A sample's path: `_generate` (the agent loop, engine calls inside) -> `_judge` -> COMPLETED; when every member is,
`_put` takes the group through its `ending`, and hands it to the buffer or settles it as FILTERED.

Invariants:

- Every write goes through the member's attempt: once the group was handed back or settled, a member task that still
  runs can write nothing, whatever it does.
- A run closes exactly once: finished, handed back, or settled.
- No member starts or is redone while the lane's gate is closed, nor judges unless it is closed to wait for what runs.
- Members that are GENERATED or COMPLETED survive any number of retries of their siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from rollout_svc.agent import AgentContext, Words, Work
from rollout_svc.errors import Interrupted, SampleFailure, StaleAttempt, WorkerFailure
from rollout_svc.group import Group, Settlement
from rollout_svc.rollout.ending import reach_end, tell_failure
from rollout_svc.rollout.generating import refuse_incomplete, run_agent
from rollout_svc.rollout.member import Host, Member, Owner, Tools
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.view import view_of
from rollout_svc.sample import ResumeAt, Sample, SampleStatus

__all__ = ["GroupRun"]

_S: Final = SampleStatus
_JUDGEABLE: Final = frozenset({_S.GENERATED, _S.JUDGING, _S.COMPLETED})


class GroupRun:
    """The tasks of one group; see the module's invariants."""

    __slots__ = ("_owner", "_tools", "closed", "group", "host", "members", "putting", "runtime")

    def __init__(
        self, group: Group, runtime: TaskRuntime, tools: Tools, owner: Owner, host: Host | None = None
    ) -> None:
        self.group = group
        self.host = host
        self.runtime = runtime
        self.members: dict[str, Member] = {}
        self.putting: asyncio.Task[None] | None = None
        self.closed = False
        self._tools = tools
        self._owner = owner

    def __repr__(self) -> str:
        stages = {member.sample.index: member.stage for member in self.members.values()}
        return f"<GroupRun {self.group.group_id} closed={self.closed} {stages}>"

    # -- starting and ending ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the group and hand out every member that is not done; the caller has looked at the gate."""
        self.group.start()
        self.launch()
        if not self.members:
            self._evaluate()

    def launch(self) -> None:
        """Give every idle unfinished member a task: at the start, and again when the gate opens over parked ones."""
        for sample in self.group.samples:
            if sample.status is not _S.COMPLETED and not sample.settled and sample.sample_id not in self.members:
                self._launch(sample)

    def _launch(self, sample: Sample) -> None:
        if sample.status in (_S.INIT, _S.ABORTED):
            partial = self._owner.keeps_partials(self.runtime)
            if sample.restarts(partial=partial):
                self._tools.tally.redone += 1
            elif sample.segments:
                self._tools.tally.continued += 1
            attempt = sample.hand_out(partial=partial)
        else:
            attempt = sample.attempt
        member = Member(sample, attempt, since=asyncio.get_running_loop().time())
        self.members[sample.sample_id] = member
        self._count_generating(member, generating=sample.status is _S.GENERATING)
        member.task = self._tools.tasks.spawn(
            f"sample:{sample.sample_id}", self._run(member), on_end=lambda: self._member_ended(member)
        )

    def hand_back(self, reason: str, not_before: float = 0.0) -> list[asyncio.Task[None]]:
        """Take the group back now, whatever its tasks do; returns those tasks, revoked, for the caller to cancel."""
        if self.closed:
            return []
        self._tools.tally.aborted += sum(sample.account == "in_flight" for sample in self.group.samples)
        self.closed = True
        self.group.hand_back(not_before)
        self.group.cuts += not self._open
        self._tools.storage.handed_back(self.group)
        tasks = self._let_go()
        self._owner.run_closed(self, reason)
        return tasks

    def end(self, outcome: Settlement, reason: str, culprit: Sample | None = None) -> int:
        """Settle the group now, whatever its tasks do; returns how many were revoked and cancelled.

        Args:
            outcome: the account it ends in.
            reason: typed reason.
            culprit: the member that caused it; None: all alike.
        """
        if self.closed:
            return 0
        self.closed = True
        self._tools.settling.end(self.group, outcome, reason, culprit)
        tasks = self._let_go()
        self._owner.cancel(self, tasks)
        self._owner.run_closed(self, reason)
        return len(tasks)

    def hand_back_stuck(self) -> list[asyncio.Task[None]]:
        """Take back the members that are not parked and leave the run to the others; returns the tasks, revoked."""
        tasks = []
        for member in [member for member in self.members.values() if not member.parked]:
            sample = member.sample
            if sample.account == "in_flight":
                resume_at: ResumeAt = "generate" if sample.status is _S.GENERATING else "judge"
                sample.transition(sample.attempt, _S.ABORTED, reason="hand_back", resume_at=resume_at)
                self._tools.tally.aborted += 1
            sample.revoke()
            self._keep((sample,))
            self._count_generating(member, generating=False)
            del self.members[sample.sample_id]
            tasks += [] if member.task is None else [member.task]
        return tasks

    def rest(self) -> None:
        """Abort the members that wait for a parked sibling: after a pause what is in flight is parked."""
        for sample in self.group.samples:
            member = self.members.get(sample.sample_id)
            ended = member is not None and member.task is not None and member.task.done()  # in this very step
            if (member is None and sample.account == "in_flight") or (ended and sample.status is _S.GENERATED):
                sample.transition(sample.attempt, _S.ABORTED, reason="hand_back", resume_at="judge")
                self._tools.tally.aborted += 1

    def _let_go(self) -> list[asyncio.Task[None]]:
        """Stop counting the members, whose tasks may run on for ever, and return those tasks."""
        for member in self.members.values():
            self._count_generating(member, generating=False)
        tasks = [member.task for member in self.members.values() if member.task is not None]
        return tasks + ([self.putting] if self.putting is not None else [])

    def _keep(self, samples: Iterable[Sample]) -> None:
        """Have written down what these samples came to."""
        for sample in samples:
            self._tools.storage.kept(sample)

    def _count_generating(self, member: Member, *, generating: bool) -> None:
        """Count from the hand-out, not from the task's first step: the producer decides between the two."""
        if generating != member.counted:
            member.counted = generating
            if generating:
                self._owner.generation_started(self)
            else:
                self._owner.generation_ended(self)

    def _member_ended(self, member: Member) -> None:
        self._count_generating(member, generating=False)
        if self.members.get(member.sample.sample_id) is not member:
            return  # taken back before its task ended
        del self.members[member.sample.sample_id]
        member.sample.since = asyncio.get_running_loop().time()
        if self.closed:
            return
        self._keep(self.group.samples if self.runtime.desk.by_group else (member.sample,))
        if not self.members:
            self._owner.run_changed(self)
            self._evaluate()
        elif self.runtime.on_pause == "park":
            self._owner.run_changed(self)  # those that are left may all be parked

    def _evaluate(self) -> None:
        """No member task is left: what now?"""
        samples = self.group.samples
        if self.group.complete:
            self.putting = self._tools.tasks.spawn(f"put:{self.group.group_id}", self._put())
        elif self.runtime.desk.by_group and self._may_judge and all(sample.status in _JUDGEABLE for sample in samples):
            lead = Member(samples[0], samples[0].attempt, "judging", asyncio.get_running_loop().time())
            self.members[samples[0].sample_id] = lead
            lead.task = self._tools.tasks.spawn(f"judge-group:{self.group.group_id}", self._judge_group())
            lead.task.add_done_callback(lambda _: self._member_ended(lead))
        else:
            self.hand_back("unfinished", self._rest_until())

    def _rest_until(self) -> float:
        """A group that came back although nobody paused rests a little longer each time, so that nothing storms."""
        if not self._tools.gate.is_open(self.group.lane):
            return 0.0
        backoff_s: float = min(5.0, 0.1 * 2 ** min(self.group.hand_backs, 6))
        return asyncio.get_running_loop().time() + backoff_s

    async def _put(self) -> None:
        """Take a group whose members are all COMPLETED through its end; see `ending`."""
        try:
            dropped = await reach_end(self, self._tools, self._owner)
        except Exception:
            self.hand_back("put_failed", self._rest_until())
            raise
        if self.closed:
            return
        self.closed = True
        if dropped is None:
            self.group.finish(asyncio.get_running_loop().time())
        else:
            self._tools.settling.end(self.group, "filtered", dropped)
        self._owner.run_closed(self, dropped or "finished")

    # -- one member ------------------------------------------------------------------------------------------

    async def _run(self, member: Member) -> None:
        """Take one sample as far as it goes now; a failure with attempts left goes round again."""
        again = True
        while again:
            try:
                again = await self._attempt(member)
            except StaleAttempt:
                return

    async def _attempt(self, member: Member) -> bool:
        """One attempt; returns whether another follows at once."""
        try:
            await self._advance(member)
        except (Interrupted, WorkerFailure):
            self._cut(member)
        except SampleFailure as failure:
            return self._failed(member, failure)
        except StaleAttempt:
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours: told loudly, and counted, or it would go on for ever
            self._owner.bug(f"sample:{member.sample.sample_id}", error)
            return self._failed(member, SampleFailure("internal", f"{type(error).__name__}: {error}"))
        return False

    async def _advance(self, member: Member) -> None:
        """From where the sample stands to its reward, or to where it has to wait for its siblings."""
        sample = member.sample
        if sample.status is _S.GENERATING:
            await self._generate(member)
        if self.runtime.desk.by_group:
            return
        if sample.status is _S.GENERATED:
            if self._sibling_has_to_generate(sample) or not self._may_judge:
                return
            sample.transition(member.attempt, _S.JUDGING)
        await self._judge(member)

    @property
    def _open(self) -> bool:
        return self._tools.gate.is_open(self.group.lane)

    @property
    def _may_judge(self) -> bool:
        return self._tools.gate.may_finish(self.group.lane)

    def _sibling_has_to_generate(self, sample: Sample) -> bool:
        return any(
            other is not sample and other.status is _S.ABORTED and other.resume_at == "generate"
            for other in self.group.samples
        )

    async def _generate(self, member: Member) -> None:
        sample = member.sample
        context = member.context = AgentContext(
            sample=sample,
            attempt=member.attempt,
            prompt=self.group.prompt,
            lane=self.group.lane,
            sampling=self.runtime.sampling,
            on_pause=self.runtime.on_pause,
            one_turn=self.runtime.one_turn,
            engines=self._tools.engines,
            signals=self._tools.signals,
            on_parked=lambda: self._owner.run_changed(self),
            words=Words(self._tools.codec),
            work=Work(sample.sample_id, self._tools.tasks, self._tools.processes),
            sessions=self._tools.sessions,
            experts=self._tools.experts,
        )
        member.stage = "generating"
        self._count_generating(member, generating=True)
        began = asyncio.get_running_loop().time()
        try:
            await run_agent(self.runtime.agent, sample, context)
        except SampleFailure:  # counted at once: whoever takes the sample back while it cleans up would undo it
            context.work.leave()
            raise
        finally:
            await context.work.close()
            self._count_generating(member, generating=False)
            if sample.attempt == member.attempt:
                sample.generate_s = (sample.generate_s or 0.0) + asyncio.get_running_loop().time() - began
        refuse_incomplete(sample, context)
        sample.transition(member.attempt, _S.GENERATED)

    async def _judge(self, member: Member) -> None:
        sample, desk = member.sample, self.runtime.desk
        member.stage, member.judging_since = "judging", asyncio.get_running_loop().time()
        view = await view_of(sample, member.attempt, self.group.prompt, self._tools.codec)
        [reward] = await self._tools.judging.judge(desk, self.group.lane, [view])
        sample.grade(member.attempt, reward.value, reward.parts)
        sample.judge_s = asyncio.get_running_loop().time() - member.judging_since

    async def _judge_group(self) -> None:
        """Judge all members at once; a failure counts against each of them."""
        samples, desk = self.group.samples, self.runtime.desk
        attempts = [sample.attempt for sample in samples]
        began = asyncio.get_running_loop().time()
        try:
            for sample, attempt in zip(samples, attempts, strict=True):
                if sample.status is _S.GENERATED:
                    sample.transition(attempt, _S.JUDGING)
            of = self.group.prompt, self._tools.codec
            views = [await view_of(sample, attempt, *of) for sample, attempt in zip(samples, attempts, strict=True)]
            rewards = await self._tools.judging.judge(desk, self.group.lane, views)
            for sample, attempt, reward in zip(samples, attempts, rewards, strict=True):
                if sample.status is not _S.COMPLETED:
                    sample.grade(attempt, reward.value, reward.parts)
                    sample.judge_s = asyncio.get_running_loop().time() - began
        except Interrupted:
            return  # the gate is closed, so _evaluate hands the group back: every member goes on at its judge
        except StaleAttempt:
            return
        except SampleFailure as failure:
            self._group_failed(failure)
        except Exception as error:  # noqa: BLE001 - as for one sample: told loudly, and counted
            self._owner.bug(f"judge-group:{self.group.group_id}", error)
            self._group_failed(SampleFailure("internal", f"{type(error).__name__}: {error}"))

    def _group_failed(self, failure: SampleFailure) -> None:
        for sample in self.group.samples:
            if not self.closed and sample.status is not _S.COMPLETED:
                self._count_failure(sample, failure)

    # -- what can go wrong -----------------------------------------------------------------------------------

    def _cut(self, member: Member) -> None:
        """The right to go on was withdrawn, or no worker could take it: keep the tokens, go on later."""
        sample, context = member.sample, member.context
        sample.check(member.attempt)
        resume_at: ResumeAt = "judge"
        if sample.status is _S.GENERATING:
            resume_at = (context.cut if context is not None else None) or "generate"
            sample.finish_reason = "abort"
        sample.transition(member.attempt, _S.ABORTED, reason="interrupted", resume_at=resume_at)
        self._tools.tally.aborted += 1

    def _failed(self, member: Member, failure: SampleFailure) -> bool:
        """Count a failure; returns whether the member goes on at once, with a new attempt."""
        sample = member.sample
        sample.check(member.attempt)
        if not self._count_failure(sample, failure) or not self._open:
            return False
        member.attempt = sample.hand_out()
        member.since = asyncio.get_running_loop().time()
        member.context = None
        return True

    def _count_failure(self, sample: Sample, failure: SampleFailure) -> bool:
        """Put a failed sample where it goes on, or fail its group for good; returns whether it may be tried again."""
        sample.failures += 1
        desk = self.runtime.desk
        awaited = not desk.by_group or desk.partial == "wait" or sample.status is not _S.GENERATING
        final = sample.failures >= self._tools.max_attempts or not awaited
        tell_failure(self._tools, self.group.prompt.task, sample, failure, sample.failures, final=final)
        if final or sample.status in (_S.COMPLETED, _S.INIT):
            self.end("failed", failure.reason, sample)
            return False
        if sample.status is _S.JUDGING:
            sample.transition(sample.attempt, _S.ABORTED, reason=failure.reason, resume_at="judge")
        else:
            sample.transition(sample.attempt, _S.INIT, reason=failure.reason)
            self._tools.tally.redone += 1
        return True
