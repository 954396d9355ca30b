"""The mutants: kinds of bugs that rollout stages have had, one line each.

Invariant: data only; nothing here imports the service.
"""

from __future__ import annotations

from typing import Final

from tests.simulation.mutants.mutant import Edit, Mutant
from tests.simulation.mutants.routed import ROUTED
from tests.simulation.mutants.sharded import SHARDED

__all__ = ["MUTANTS"]


def _mutant(name: str, bug: str, caught_by: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, bug, tuple(Edit(*edit) for edit in edits), frozenset(caught_by.split()))


_ALL: Final = (
    # -- answers and outcomes --------------------------------------------------------------------------------
    _mutant(
        "no_epoch_check",
        "an answer that comes after its epoch closed counts for the new model",
        "P3",
        (
            "workers.pool",
            "completion.late = call.epoch != self._gate.epoch(call.lane)",
            "completion.late = False",
        ),
    ),
    _mutant(
        "write_without_attempt",
        "a task whose sample was taken back goes on writing to it",
        "P3",
        ("sample.sample", "if attempt != self.attempt:", "if attempt > self.attempt:"),
    ),
    _mutant(
        "failed_becomes_aborted",
        "an invalid answer is taken for one that was cut, and is never counted",
        "P4",
        (
            "rollout.run",
            "except (Interrupted, WorkerFailure):\n            self._cut(member)",
            "except (Interrupted, WorkerFailure, SampleFailure):\n            self._cut(member)",
        ),
    ),
    _mutant(
        "failure_is_reward_zero",
        "a judge that raises has given reward 0",
        "P2",
        (
            "judging.calls",
            "    if error is not None:\n        raise _failure(desk, error) from error",
            "    if error is not None:\n        return [Reward(0.0)] * expected",
        ),
    ),
    _mutant(
        "failed_filter_keeps",
        "a filter that raises, hangs or talks nonsense has kept its group",
        "P2",
        (
            "rollout.ending",
            "            _filter_failed(run, tools, failure)\n            continue",
            "            return None",
        ),
    ),
    _mutant(
        "kept_before_it_was_heard",
        "a group counts as kept as soon as its filter is asked, and is not asked about again after a pause",
        "P2",
        (
            "rollout.ending",
            "    while desk is not None and not group.passed and not run.closed:",
            "    while desk is not None and not group.passed and not run.closed:\n        group.passed = True",
        ),
    ),
    _mutant(
        "filtered_group_forgotten",
        "a group that is filtered is left where it is, and nobody settles it",
        "hang P8 P9",
        (
            "rollout.run",
            "        if self.closed:\n            return\n        self.closed = True\n        if dropped",
            "        if self.closed or dropped:\n            return\n        self.closed = True\n        if dropped",
        ),
    ),
    _mutant(
        "dropped_keeps_its_tokens",
        "what is filtered or expired keeps its record",
        "P28",
        (
            "sample.sample",
            (
                "        self.packed = None\n        self.segments, self.earlier, self._left = [], [], None\n"
                "        if self.asked_ids"
            ),
            "        if self.asked_ids",
        ),
    ),
    _mutant(
        "completed_sibling_reset",
        "a group that goes back takes its completed members through their judge again",
        "P5",
        (
            "sample.status",
            "_S.COMPLETED: frozenset({_S.CONSUMED}) | DROPPED",
            "_S.COMPLETED: frozenset({_S.CONSUMED, _S.ABORTED}) | DROPPED",
        ),
        (
            "group",
            '    SampleStatus.JUDGING: "judge",\n}',
            '    SampleStatus.JUDGING: "judge",\n    SampleStatus.COMPLETED: "judge",\n}',
        ),
    ),
    _mutant(
        "budget_begins_again",
        "a continued turn may make max_tokens more",
        "P6",
        ("agent.context", "budget = settings.max_tokens - sample.turn_length", "budget = settings.max_tokens"),
    ),
    _mutant(
        "version_from_belief",
        "tokens are stamped with the version the worker is thought to have",
        "P7",
        (
            "workers.pool",
            "completion.worker = worker.worker_id",
            "completion.spans = tuple(span._replace(version=worker.version) for span in completion.spans)",
        ),
    ),
    # -- the account -----------------------------------------------------------------------------------------
    _mutant(
        "claimed_group_not_counted",
        "a group that was taken out of the buffer and not started yet is counted nowhere",
        "P1",
        (
            "producer.loop",
            "self._rollouts.start(group, self._runtimes[group.prompt.task])",
            "asyncio.get_running_loop().call_soon(self._rollouts.start, group, self._runtimes[group.prompt.task])",
        ),
    ),
    _mutant(
        "results_dropped_at_timeout",
        "what a drain that ran out of time hands back has lost its tokens",
        "P10",
        (
            "group",
            'sample.transition(sample.attempt, SampleStatus.ABORTED, reason="hand_back", resume_at=resume_at)',
            """sample.transition(sample.attempt, SampleStatus.ABORTED, reason="hand_back", resume_at=resume_at)
                sample.segments = []""",
        ),
    ),
    _mutant(
        "lease_not_returned",
        "a batch that was not acknowledged comes back without its first group",
        "P1",
        ("buffer.replay", "for group in reversed(lease.groups):", "for group in reversed(lease.groups[1:]):"),
    ),
    _mutant(
        "dataset_burned",
        "prompts are used up although no worker is in traffic",
        "P18",
        ("producer.schedule", "if counts.active_workers == 0:", "if counts.active_workers < 0:"),
        (
            "producer.schedule",
            "counts.generating >= rule.required * counts.active_workers",
            "counts.generating >= rule.required * max(1, counts.active_workers)",
        ),
    ),
    # -- what a pause may miss -------------------------------------------------------------------------------
    _mutant(
        "spawn_not_registered",
        "a call is counted a step after it was let through, and a pause in between does not see it",
        "P9",
        (
            "workers.pool",
            "        epoch = self._gate.epoch(lane)\n",
            "        await asyncio.sleep(0)\n        epoch = self._gate.epoch(lane)\n",
        ),
    ),
    _mutant(
        "put_not_counted",
        "a group that is being written is not pending, and ends after the report",
        "P9",
        (
            "rollout.run",
            'self.putting = self._tools.tasks.spawn(f"put:{self.group.group_id}", self._put())',
            'self._tools.tasks.spawn(f"put:{self.group.group_id}", self._put())',
        ),
    ),
    _mutant(
        "judge_sees_edge_only",
        "a judge is told when the gate closes, and does not look whether it is closed",
        "P13",
        (
            "judging.calls",
            "if not self._gate.may_finish(lane):\n            raise",
            "if lane not in self._gate._modes:\n            raise",
        ),
    ),
    _mutant(
        "judge_after_wait_report",
        "after the report of a wait, an agent that comes back is still judged",
        "P13",
        ("gate", '(self._modes[lane] == "wait" and lane not in self._finished)', 'self._modes[lane] == "wait"'),
    ),
    _mutant(
        "retry_not_interrupted",
        "a back-off sleep is slept to its end while the stage is being paused",
        "P20",
        (
            "workers.pool",
            "open_still = await self._signals.sleep_while_open(lane, seconds)",
            "open_still = await asyncio.sleep(seconds, result=True)",
        ),
    ),
    _mutant(
        "abort_sent_once",
        "an abort that was lost is not sent again",
        "P9",
        ("pause.draining", "return bool(calls) or not going_on", "return not going_on"),
    ),
    _mutant(
        "stale_reabort",
        "an abort on its way is not called back when its pause ends, and hits what runs after the resume",
        "P17",
        ("pause.ladder", "            _cancel(climb.drains)\n", "            climb.drains.clear()\n"),
    ),
    # -- what a pause may wait for ---------------------------------------------------------------------------
    _mutant(
        "wait_for_gather",
        "judges are ended by wait_for(gather(...)), which waits for those that swallow it",
        "P8 P13",
        (
            "pause.ladder",
            "await _in_slices(lambda: self._judging.interrupt(climb.lanes, _SLICE))",
            """judges = asyncio.gather(*(call.work for call in self._judging.calls), return_exceptions=True)
            await asyncio.gather(asyncio.wait_for(judges, 0.001), return_exceptions=True)""",
        ),
    ),
    _mutant(
        "one_exception_ends_the_drain",
        "an abort that fails ends the drain of its worker",
        "P12",
        (
            "workers.aborting",
            """            except WorkerFailure as failure:
                taken = False""",
            """            except WorkerFailure as failure:
                raise""",
        ),
    ),
    _mutant(
        "caller_takes_the_climb_along",
        "a caller of pause that leaves ends the pause for everybody",
        "P11 hang Deadlock Livelock",
        ("pause.controller", "return await asyncio.shield(climbing)", "return await climbing"),
    ),
    # -- what it says ----------------------------------------------------------------------------------------
    _mutant(
        "late_pause_after_resume",
        "a pause that was meant for an earlier state is carried out after the resume",
        "P11",
        (
            "pause.standing",
            "if if_ticket is not None and if_ticket not in allowed:",
            "if if_ticket is not None and if_ticket > max(allowed):",
        ),
    ),
    _mutant(
        "stale_count_at_join",
        "what was counted before a join is reported for what the join stopped",
        "P9",
        ("pause.ladder", "            tally.residual = None  # what", "            # what"),
    ),
    _mutant(
        "abandoned_keeps_traffic",
        "a worker that still runs what a pause abandoned gets new requests",
        "P9",
        (
            "pause.ladder",
            'worker.put_in_quarantine("residual", f"pause {climb.ticket} left {tally.abandoned} requests running")',
            'worker.reason = f"pause {climb.ticket} left {tally.abandoned} requests running"',
        ),
    ),
    # -- what survives ---------------------------------------------------------------------------------------
    _mutant(
        "prompt_and_group_apart",
        "a prompt that was admitted is not used up in the journal, and is admitted again after a restart",
        "P31",
        ("buffer.journal.tables", "UPDATE pushed SET line = NULL WHERE", "UPDATE pushed SET line = line WHERE"),
    ),
    _mutant(
        "lease_not_durable",
        "a batch is handed out before its lease is written",
        "P31",
        (
            "batches",
            "await self._storage.flush()  # a batch that a crash forgot would be handed out a second time",
            "await asyncio.sleep(0)",
        ),
    ),
    _mutant(
        "ack_not_durable",
        "an ack is answered before it is written",
        "P31",
        (
            "batches",
            "        if self._acknowledge(batch_id):\n            await self._storage.flush()",
            "        if self._acknowledge(batch_id):\n            await asyncio.sleep(0)",
        ),
    ),
    _mutant(
        "push_not_durable",
        "a push is answered before it is written",
        "P31",
        (
            "pushing",
            "    parts.producer.wake()\n    await parts.storage.flush()\n",
            "    parts.producer.wake()\n    await __import__('asyncio').sleep(0)\n",
        ),
    ),
    _mutant(
        "consumed_comes_back",
        "an acknowledged batch stays in the journal, and comes back after a restart",
        "P31",
        ("buffer.journal.tables", '        self._end(note.group_ids, "consumed")\n', ""),
    ),
    _mutant(
        "expired_prompt_forgotten",
        "a prompt whose group expired is not in the journal while it waits to be admitted again",
        "P31",
        ("buffer.journal.tables", "        if note.again:\n", "        if note.again and not note.group_id:\n"),
    ),
    # -- how old things may be -------------------------------------------------------------------------------
    _mutant(
        "no_sweep_at_hand_over",
        "a group is as old as it was when it became ready",
        "P32",
        (
            "batches",
            "reason = refusal(group, step, self.max_staleness)",
            "reason = refusal(group, 0, self.max_staleness)",
        ),
    ),
    _mutant(
        "mask_one_step_late",
        "a token is masked a step later than its bound says",
        "P32",
        ("producer.masking", "span.version < oldest]", "span.version < oldest - 1]"),
    ),
    _mutant(
        "batch_ready_without_its_mix",
        "a batch that is large enough stops production, whatever its mix lacks",
        "hang",
        ("producer.schedule", " and not counts.lacking:", ":"),
    ),
    # -- frozen engines --------------------------------------------------------------------------------------
    _mutant(
        "freeze_not_confirmed",
        "a worker counts as frozen although its engine never said so",
        "P9",
        (
            "workers.freezing",
            "worker.freeze.confirmed = await self._sent(worker, worker.dialect.freeze(cache), timeout_s)",
            "worker.freeze.confirmed = await self._sent(worker, worker.dialect.freeze(cache), timeout_s) or True",
        ),
    ),
    _mutant(
        "thaw_forgotten",
        "a resume opens the gate and leaves the engines frozen",
        "P10 hang",
        ("pause.controller", "        self._freezing.thaw_all()\n", ""),
    ),
    _mutant(
        "time_limit_counts_frozen",
        "a request's time limit goes on while its engine is frozen",
        "P10",
        ("workers.worker", "call.held_s += now - self.freeze.since", "call.held_s += 0.0"),
    ),
    # -- evaluations -----------------------------------------------------------------------------------------
    _mutant(
        "evaluation_is_stored",
        "what an evaluation came to is written down as training's",
        "P28",
        ("assembly.parts", "tools=apart(tools),", "tools=tools,"),
    ),
    _mutant(
        "evaluation_not_pinned",
        "an evaluation goes on under other weights",
        "P7",
        ("evaluations.evaluations", "evaluation.version != now and evaluation.error is None", "evaluation.version < 0"),
        ("evaluations.evaluations", "group.versions() - {evaluation.version}", "not group.samples"),
    ),
    _mutant(
        "pause_ends_every_lane",
        "a pause of one lane cancels what the other runs",
        "P15 P9",
        ("pause.climb", "worker.in_lanes(self.lanes)", "list(worker.calls.values())"),
    ),
    _mutant(
        "evaluation_outlives_its_time",
        "an evaluation whose time is up is waited for",
        "P8 hang",
        ("evaluations.evaluations", "async with asyncio.timeout_at(deadline):", "async with asyncio.timeout(None):"),
    ),
)

MUTANTS: Final[dict[str, Mutant]] = {mutant.name: mutant for mutant in (*_ALL, *ROUTED, *SHARDED)}
"""By name, in the order of the table."""
