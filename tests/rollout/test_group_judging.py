"""Group judgers wait for every member, or end the group at the first that fails; a judge is repeated, not a sample."""

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import SampleFailure
from rollout_svc.judging import JudgedSample
from rollout_svc.judging.desk import JudgeDesk, Partial
from rollout_svc.plugins import PluginSpec
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.sample import Sample, SampleStatus
from tests.rollout.test_unruly_plugins import Agent, Stage
from tests.support.caller import answer
from tests.support.groups import make_group
from tests.support.virtual import virtual

S = SampleStatus


class Sizes:
    """Gives each member the size of what it was shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    async def judge_group(self, samples: list[JudgedSample]) -> list[float]:
        self.shown.append(len(samples))
        return [float(len(samples))] * len(samples)


async def once(sample: Sample, ctx: Any) -> Sample:
    """Make one turn."""
    await ctx.generate(sample.prompt_ids)
    return sample


def stage_of(judger: Any, *script: Any, size: int, **limits: Any) -> Stage:
    """Make a stage whose group has some members, and whose desk has limits."""
    stage = Stage(once, judger, *script)
    desk = JudgeDesk(name="j", judger=judger, spec=PluginSpec("m:a", {}), timeout_s=5, **limits)
    stage.runtime = TaskRuntime("t", Agent(once), "abort", True, desk, stage.runtime.sampling, 1.0)
    stage.group = make_group(stage.ledger, size=size)
    return stage


@pytest.mark.parametrize(("partial", "outcome", "shown"), [("wait", "ready", [2]), ("fail", "failed", [])])
def test_a_partial_group_is_never_judged(partial: Partial, outcome: str, shown: list[int]) -> None:
    """A member that failed is made again and waited for, or ends its group: as the policy says."""  # P2, P5

    @virtual
    async def run() -> None:
        judger = Sizes()
        script = (SampleFailure("invalid_response", "odd"), answer([7]), answer([8]))
        stage = stage_of(judger, *script, size=2, partial=partial)
        await stage.run()
        assert (stage.group.account, judger.shown) == (outcome, shown)
        if partial == "wait":
            assert [sample.reward for sample in stage.group.samples] == [2.0, 2.0]
        else:
            assert stage.group.reason == "invalid_response"

    run()


@virtual
async def test_a_judge_that_is_redone_costs_no_attempt_and_no_token() -> None:
    """With second chances, nothing is generated again and nothing counts against the sample."""  # P6, P21

    class Moody:
        left = 2

        async def judge(self, sample: JudgedSample) -> float:
            self.left -= 1
            if self.left >= 0:
                raise ValueError("odd")
            return 0.5

    stage = stage_of(Moody(), answer([7]), size=1, redos=2)
    stage.rollouts.start(stage.group, stage.runtime)
    await asyncio.sleep(10)
    [sample] = stage.group.samples
    assert (sample.status, sample.reward, sample.failures) == (S.COMPLETED, 0.5, 0)
    assert len(stage.caller.asked) == 1
    stage.ledger.check()
