"""Evaluations: prompts answered and judged in lane `eval`, beside training and apart from it.

Invariants:

- Each prompt is a group of one sample, in a ledger of their own, which is settled when the evaluation ends, however it
  does. Nothing of it is in the replay buffer, in what is stored, or in the counts of training.
- At most `limit` are inside their agent loop at once. Of several evaluations the one with the fewest there goes
  first; in line for a worker's slot the two lanes take turns (`workers.line`).
- All tokens that are returned were made by one weight version. When the fleet leaves it, the evaluation fails.
- Deciding and starting are one step: nothing starts while the lane is closed. What a pause cuts goes on from its
  tokens when the lane opens.
- An evaluation ends by its deadline, with its caller, or with the service; then nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.errors import Conflict, NotNow, SampleFailure, ServiceError
from rollout_svc.evaluations.evaluation import Evaluation
from rollout_svc.evaluations.refusals import out_of_time, weights_moved
from rollout_svc.evaluations.request import Request, read_request
from rollout_svc.events import EvaluationFinished, EvaluationStarted, EventBus, SampleFailed, WeightsUpdated
from rollout_svc.gate import Gate, Lane
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.producer.lines import PromptLine
from rollout_svc.prompt import Prompt
from rollout_svc.rollout.member import Tools
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.tokens import Refused
from rollout_svc.workers.pool import WorkerPool

__all__ = ["Evaluations", "apart"]

_LANE: Final[Lane] = "eval"
_SLICE: Final = 8  # groups started between two yields, so that opening connections never holds the loop for long
_CLOSED: Final = 64  # groups settled, and their tasks cancelled, between two yields
_ANSWERED: Final = "answered"


def apart(tools: Tools) -> Tools:
    """Training's tools, less what stores and counts, and no routed experts: an evaluation leaves no trace there."""
    storage, tally = MemoryStorage(), Tally()
    settling = Settling(tally=tally, bus=EventBus(), storage=storage)
    return replace(tools, storage=storage, tally=tally, settling=settling, experts=False)


class Evaluations:
    """Every evaluation under way; see the module's invariants."""

    def __init__(
        self,
        *,
        rollouts: Rollouts,
        tools: Tools,
        pool: WorkerPool,
        gate: Gate,
        runtimes: Mapping[str, TaskRuntime],
        refused: Refused,
        bus: EventBus,
        version: Callable[[], int],
        limit: int,
        new_id: Callable[[], str],
    ) -> None:
        """Wire it; starts nothing.

        Args:
            rollouts: runs groups.
            tools: what runs use, with storage and counts that are not training's.
            pool: the fleet.
            gate: open or closed.
            runtimes: the tasks.
            refused: kinds of prompt content that cannot become tokens here.
            bus: where events go.
            version: the fleet's weight version.
            limit: members inside their agent loop at once, over all evaluations.
            new_id: makes unique ids.
        """
        self.tools = tools
        self.ledger = Ledger()
        self.generating = 0
        self.oldest: Callable[[Collection[str]], list[dict[str, Any]]] = lambda _: []
        self._rollouts = rollouts
        self._pool = pool
        self._gate = gate
        self._runtimes = runtimes
        self._refused = refused
        self._bus = bus
        self._version = version
        self._limit = limit
        self._new_id = new_id
        self._open: dict[str, Evaluation] = {}
        self._of_group: dict[str, Evaluation] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0  # loop time of the last step: what rested then is still to be woken for
        self._stopped: Callable[[], ServiceError] | None = None
        gate.subscribe(self._gate_changed)
        bus.subscribe(WeightsUpdated, lambda _: self._check_versions())

    def __repr__(self) -> str:
        return f"<Evaluations {list(self._open.values())} {self.ledger}>"

    # -- the call --------------------------------------------------------------------------------------------

    async def evaluate(
        self,
        task: str,
        prompts: Sequence[Any],
        *,
        sampling: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout_s: float,
    ) -> list[Group]:
        """Have every prompt answered once, and judged; returns the groups in order (`record_of`).

        A caller that is cancelled ends its evaluation: its requests are aborted.

        Args:
            task: whose agent, judger and sampling.
            prompts: prompt lines.
            sampling: keys laid over the task's.
            version: the weight version to evaluate; None: the fleet's when the first prompt starts.
            timeout_s: seconds for all of it, from this call.

        Raises:
            NotFound: there is no such task.
            BadRequest: with the path of what is wrong.
            Conflict: `weight_version`: the fleet is at another; `version_changed`: it left it meanwhile.
            NotNow: `not_enough`, or `paused` where the lane is closed, when the time is up; what stops the service.
        """
        started = asyncio.get_running_loop().time()
        request = await read_request(
            task,
            prompts,
            sampling=sampling,
            version=version,
            timeout_s=timeout_s,
            runtimes=self._runtimes,
            refused=self._refused,
            dialects=[worker.dialect for worker in self._pool.workers.values()],
        )
        if self._stopped is not None:
            raise self._stopped()
        if version is not None and version != self._version():
            detail = {"version": version, "weight_version": self._version()}
            raise Conflict(f"the fleet is at version {self._version()}", type="weight_version", detail=detail)
        evaluation = Evaluation(
            evaluation_id=self._new_id(), runtime=request.runtime, wanted=len(request.lines), version=version
        )
        self._open[evaluation.evaluation_id] = evaluation
        self._bus.emit(EvaluationStarted(evaluation.evaluation_id, task, evaluation.wanted, version))
        outcome = "cancelled"
        try:
            await self._carry_out(evaluation, request, started + timeout_s)
            outcome = _ANSWERED
        except ServiceError as error:
            outcome = error.type
            raise
        finally:
            await self._end(evaluation, outcome, started)
        return evaluation.groups

    async def _carry_out(self, evaluation: Evaluation, request: Request, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._feed(evaluation, request.lines)
                while not evaluation.complete:
                    await self._moved(evaluation)
        except TimeoutError:
            if not evaluation.complete:
                oldest = self.oldest({group.group_id for group in evaluation.groups})
                paused, in_traffic = not self._gate.is_open(_LANE), bool(self._pool.in_traffic)
                raise out_of_time(evaluation, oldest, paused=paused, in_traffic=in_traffic) from None

    async def _feed(self, evaluation: Evaluation, lines: Sequence[PromptLine]) -> None:
        """Encode and admit the prompts, a little ahead of what is started."""
        for line in lines:
            while len(evaluation.idle) >= self._limit:
                await self._moved(evaluation)
            failure = None
            ids: list[int] = []
            try:
                ids = await self.tools.codec.encode_prompt(line.content)
            except SampleFailure as error:
                failure = error
            if evaluation.error is not None:
                raise evaluation.error
            self._admit(evaluation, line, ids, failure)

    async def _moved(self, evaluation: Evaluation) -> None:
        """Wait until something of it has moved; raises what ended it."""
        if evaluation.error is None:
            evaluation.changed.clear()
            await evaluation.changed.wait()
        if evaluation.error is not None:
            raise evaluation.error

    def _admit(self, evaluation: Evaluation, line: PromptLine, ids: list[int], failure: SampleFailure | None) -> None:
        content = line.content
        prompt = Prompt(
            prompt_id=line.prompt_id,
            task=evaluation.runtime.name,
            input_ids=ids,
            content=content.get("messages") or content.get("text"),
            ground_truth=content.get("ground_truth"),
            meta=dict(content.get("meta") or {}),
            engine_extra=dict(content.get("engine_extra") or {}),
        )
        now = asyncio.get_running_loop().time()
        group = Group(group_id=self._new_id(), prompt=prompt, size=1, lane=_LANE, ledger=self.ledger, now=now)
        evaluation.groups.append(group)
        if failure is not None:
            self._fail(group, failure.reason, failure.message)
            evaluation.finished += 1
            return
        self._of_group[group.group_id] = evaluation
        evaluation.idle.append(group)
        self.wake()

    def _fail(self, group: Group, reason: str, message: str) -> None:
        """Settle a group that no run holds, and that cannot be answered."""
        self._bus.emit(SampleFailed(group.samples[0].sample_id, group.prompt.task, reason, message, 1, final=True))
        group.settle("failed", reason)

    # -- the end ---------------------------------------------------------------------------------------------

    async def _end(self, evaluation: Evaluation, outcome: str, started: float) -> None:
        """Settle every group and abort what runs, whoever cancels the caller meanwhile."""
        closing = self.tools.tasks.spawn(
            f"evaluation:{evaluation.evaluation_id}", self._close(evaluation, outcome), handled=True
        )
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise
        finally:
            seconds = asyncio.get_running_loop().time() - started
            task, finished, failed = evaluation.runtime.name, evaluation.finished, evaluation.failed
            self._bus.emit(EvaluationFinished(evaluation.evaluation_id, task, outcome, finished, failed, seconds))

    async def _close(self, evaluation: Evaluation, outcome: str) -> None:
        evaluation.end(NotNow("not_enough", "it is over"))  # nothing of it is started from here on
        for number, group in enumerate(evaluation.groups, 1):
            self._settle(group, outcome)
            if number % _CLOSED == 0:
                await asyncio.sleep(0)
        del self._open[evaluation.evaluation_id]

    def _settle(self, group: Group, outcome: str) -> None:
        if group.account == "in_flight":
            self._rollouts.end(group, "expired", outcome)
        elif group.account == "ready" and outcome == _ANSWERED:
            group.lease()
            group.settle("consumed")
        elif not group.settled:
            group.settle("expired", outcome)
        self._of_group.pop(group.group_id, None)

    def fail(self, error: Callable[[], ServiceError]) -> None:
        """End every evaluation, and refuse those to come: the service stops, or a part of it died.

        Args:
            error: makes the error of each: one that is raised twice would carry both of its ways here.
        """
        self._stopped = self._stopped or error
        for evaluation in self._open.values():
            evaluation.end(error())

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_versions(self) -> None:
        """Tokens of other weights are of no use to an evaluation: those the fleet has left fail."""
        now = self._version()
        for evaluation in self._open.values():
            if evaluation.version is not None and evaluation.version != now and evaluation.error is None:
                evaluation.end(weights_moved(evaluation, now))

    # -- starting --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    async def run(self) -> None:
        """Start what may be started, until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                started = 0
                while self._step():
                    started += 1
                    if started % _SLICE == 0:
                        await asyncio.sleep(0)
                self._rest()
        finally:
            self.close()

    def _step(self) -> bool:
        """Start one group; returns whether there may be more to start."""
        self._looked_at = asyncio.get_running_loop().time()
        if self.generating >= self._limit or not self._gate.is_open(_LANE) or not self._pool.in_traffic:
            return False
        self._check_versions()
        now = asyncio.get_running_loop().time()
        due = [evaluation for evaluation in self._open.values() if evaluation.due(now)]
        if not due:
            return False
        evaluation = min(due, key=lambda evaluation: evaluation.generating)
        if evaluation.version is None:
            evaluation.version = self._version()
        self._rollouts.start(evaluation.next(now), evaluation.runtime, self)
        return True

    def _rest(self) -> None:
        """Set the timer for the group that rests and may go on next."""
        self.close()
        # By the last look, not by now: a rest that ended in between was not seen to.
        rests = [at for e in self._open.values() if (at := e.earliest()) is not None and at > self._looked_at]
        if rests:
            self._timer = asyncio.get_running_loop().call_at(min(rests), self.wake)

    def _gate_changed(self, lane: Lane) -> None:
        if lane == _LANE:
            self.wake()

    # -- the host of its groups' runs --------------------------------------------------------------------------

    def generation_started(self, group: Group) -> None:
        """Count a member in its agent loop."""
        self.generating += 1
        evaluation = self._of_group.get(group.group_id)
        if evaluation is not None:
            evaluation.generating += 1

    def generation_ended(self, group: Group) -> None:
        """There is room for another."""
        self.generating -= 1
        evaluation = self._of_group.get(group.group_id)
        if evaluation is not None:
            evaluation.generating -= 1
        self.wake()

    def run_closed(self, group: Group) -> None:
        """No task has a group any more: it is finished, or waits to go on, or its evaluation is over."""
        evaluation = self._of_group.get(group.group_id)
        if evaluation is None or group.account == "expired":
            return
        if group.account == "aborted":
            if evaluation.error is None:
                evaluation.idle.appendleft(group)
                self.wake()
            return
        if group.account == "ready" and (others := group.versions() - {evaluation.version}):
            message = f"tokens of version {sorted(map(str, others))}, the evaluation is of {evaluation.version}"
            self._fail(group, "odd_version", message)
            self._check_versions()
        evaluation.finished += 1
        evaluation.changed.set()

    # -- looking ---------------------------------------------------------------------------------------------

    def unfinished_groups(self) -> list[Group]:
        """Groups that wait to go on, or to be started."""
        return [group for evaluation in self._open.values() for group in evaluation.idle]

    def as_json(self) -> dict[str, Any]:
        """The record in `status`."""
        return {
            "under_way": len(self._open),
            "in_flight": self._pool.in_flight[_LANE],
            "waiting": sum(evaluation.waiting for evaluation in self._open.values()),
            "max_in_flight": self._limit,
            "ledger": self.ledger.as_json(),
        }
