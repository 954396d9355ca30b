"""The end of a group whose members are all COMPLETED: recorded, filtered, made durable.

Invariants:

- It may be cut anywhere, by a pause or by its own failure, and is begun again from its beginning; what the group has
  come through already (`recorded`, `passed`) it does not come through twice.
- A group leaves it kept, dropped for a reason of its filter's, or failed: a filter that does not answer as it should
  is asked again, as often as a sample may fail, and decides nothing.
- No filter is asked again while the lane's gate is closed, unless it is closed to wait for what runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rollout_svc.errors import SampleFailure
from rollout_svc.events import SampleFailed
from rollout_svc.filtering import view_of
from rollout_svc.rollout.member import Owner, Tools
from rollout_svc.sample import Sample

if TYPE_CHECKING:
    from rollout_svc.rollout.run import GroupRun

__all__ = ["reach_end", "tell_failure"]

_TOLD_CHARS: Final = 500  # of a failure's message, told to whoever waits for a batch


async def reach_end(run: GroupRun, tools: Tools, owner: Owner) -> str | None:
    """Take a group as far as the storage; returns the reason to drop it instead. The run may have closed meanwhile."""
    if run.group.lane == "train":
        await tools.trajectories.record(run.group)
        reason = await _ask_filter(run, tools, owner)
        if reason is not None or run.closed:
            return reason
    await tools.storage.save(run.group)
    return None


async def _ask_filter(run: GroupRun, tools: Tools, owner: Owner) -> str | None:
    """The reason to drop the group, or None: it was kept, now or before, or the run has closed over it."""
    group, desk = run.group, run.runtime.filter
    while desk is not None and not group.passed and not run.closed:
        try:
            reason = await desk.ask(view_of(group), tools.tasks, lambda task: owner.cancel(run, [task]))
        except SampleFailure as failure:
            _filter_failed(run, tools, failure)
            continue
        if reason is not None:
            return reason
        group.passed = True
    return None


def _filter_failed(run: GroupRun, tools: Tools, failure: SampleFailure) -> None:
    """Count a failure of the filter; the last one is the group's, and a closed gate puts off the next try."""
    group = run.group
    group.filter_failures += 1
    final = group.filter_failures >= tools.max_attempts
    tell_failure(tools, run.group.prompt.task, group.samples[0], failure, group.filter_failures, final=final)
    if final:
        run.end("failed", failure.reason)
    elif not tools.gate.may_finish(group.lane):
        run.hand_back(failure.reason)


def tell_failure(
    tools: Tools, task: str, sample: Sample, failure: SampleFailure, failures: int, *, final: bool
) -> None:
    """Count a failure, and say what it was."""
    tools.tally.failed[failure.reason] += 1
    tools.tally.last_failure = str(failure)[:_TOLD_CHARS]
    tools.bus.emit(SampleFailed(sample.sample_id, task, failure.reason, failure.message, failures, final))
