"""A run with agents and judgers that do what they should not: the outcome is the same."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.config import SamplingConfig, TrajectoriesConfig
from rollout_svc.errors import Interrupted, NoWorker, RolloutError, WorkerFailure
from rollout_svc.events import EventBus
from rollout_svc.gate import LANES, Gate
from rollout_svc.group import Group
from rollout_svc.judging import JudgeDesk, JudgedSample, Judging
from rollout_svc.ledger import Ledger
from rollout_svc.plugins import PluginSpec
from rollout_svc.rollout.member import Tools
from rollout_svc.rollout.registry import Rollouts
from rollout_svc.rollout.runtime import TaskRuntime
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import TaskOwner
from rollout_svc.tokens import TextCodec
from rollout_svc.trajectories import Trajectories
from tests.support.caller import Caller, Step, answer
from tests.support.groups import make_group
from tests.support.virtual import soon, virtual

S = SampleStatus
Loop = Callable[[Sample, AgentContext], Coroutine[Any, Any, Sample]]


class Agent:
    """An agent loop made of a function."""

    def __init__(self, loop: Loop) -> None:
        self.run = loop


class Stage:
    """One group of one sample, and all it takes to run it."""

    def __init__(self, loop: Loop, judger: Any, *script: Step, on_pause: OnPause = "abort") -> None:
        self.gate = Gate()
        self.ledger = Ledger()
        self.tasks = TaskOwner()
        self.buffer = ReplayBuffer()
        self.caller = Caller(*script)
        self.tally = Tally()
        bus, storage = EventBus(), MemoryStorage()
        judging = Judging(gate=self.gate, tasks=self.tasks)
        desk = JudgeDesk(name="j", judger=judger, spec=PluginSpec("m:a", {}), timeout_s=5)
        judging.add_desk(desk)
        self.runtime = TaskRuntime("t", Agent(loop), on_pause, True, desk, SamplingConfig(max_tokens=10), 1.0)
        self.rollouts = Rollouts(
            tools=Tools(
                gate=self.gate,
                signals=GateSignals(self.gate),
                engines=self.caller,
                judging=judging,
                storage=storage,
                tasks=self.tasks,
                bus=bus,
                codec=TextCodec(None),
                tally=self.tally,
                settling=Settling(tally=self.tally, bus=bus, storage=storage),
                trajectories=Trajectories(TrajectoriesConfig(), bus=bus),
                max_attempts=2,
            ),
            buffer=self.buffer,
        )
        self.group: Group = make_group(self.ledger, size=1)
        self.sample = self.group.samples[0]

    async def run(self) -> None:
        """Run the group until nothing of it is left."""
        self.rollouts.start(self.group, self.runtime)
        while self.rollouts.runs(LANES):
            await soon()
        self.ledger.check()


class Judger:
    """Gives everything one point."""

    async def judge(self, sample: JudgedSample) -> float:
        return 1.0


async def swallows(sample: Sample, ctx: AgentContext) -> Sample:
    """Ask, and take no notice of any error."""
    for _ in range(3):
        try:
            await ctx.generate(sample.prompt_ids)
        except RolloutError:
            continue
    return sample


@pytest.mark.parametrize("error", [Interrupted("closed"), NoWorker("none"), WorkerFailure("http_503", "busy")])
def test_a_swallowed_cut_is_no_failure(error: Exception) -> None:
    """The sample goes back to go on later, and nothing is counted against it."""  # P20, P3

    @virtual
    async def run() -> None:
        stage = Stage(swallows, Judger(), error)
        await stage.run()
        sample = stage.sample
        assert (sample.status, sample.resume_at, sample.failures) == (S.ABORTED, "generate", 0)
        assert sample.finish_reason == "abort"
        assert (stage.group.account, len(stage.caller.asked)) == ("aborted", 1)

    run()


@virtual
async def test_a_swallowed_late_answer_is_not_judged_now() -> None:
    """A late answer keeps its tokens and waits for its judge, whatever its agent makes of the exception."""  # P3
    stage = Stage(swallows, Judger(), answer([7, 8], "stop", late=True))
    await stage.run()
    sample = stage.sample
    assert (sample.status, sample.resume_at, sample.response_ids) == (S.ABORTED, "judge", [7, 8])
    group = stage.buffer.next_unfinished(1e9)
    assert group is stage.group
    await stage.run()
    assert (sample.status, sample.finish_reason, sample.reward) == (S.COMPLETED, "stop", 1.0)
    assert len(stage.caller.asked) == 1  # P6


@virtual
async def test_an_agent_that_hangs_after_a_late_stop_costs_no_token() -> None:
    """Taken back by force while it hung, its answer is judged after all, and is not generated on."""  # P6, P8, P10
    hung = asyncio.Event()

    async def hangs_once(sample: Sample, ctx: AgentContext) -> Sample:
        try:
            await ctx.generate(sample.prompt_ids)
        except Interrupted:
            hung.set()
            await asyncio.sleep(1000)
        return sample

    stage = Stage(hangs_once, Judger(), answer([7, 8], "stop", late=True))
    stage.rollouts.start(stage.group, stage.runtime)
    await hung.wait()
    [task] = stage.rollouts.hand_back(iter(stage.rollouts.runs(LANES)), 10)
    await asyncio.wait([task])
    assert (stage.group.account, stage.sample.response_ids) == ("aborted", [7, 8])
    stage.buffer.next_unfinished(1e9)
    await stage.run()
    assert (stage.sample.status, stage.sample.response_ids, len(stage.caller.asked)) == (S.COMPLETED, [7, 8], 1)


@virtual
async def test_a_judger_cannot_change_what_it_judges() -> None:
    """What a judger does to the lists it sees changes no token of the sample, nor its prompt."""

    class Meddler:
        async def judge(self, sample: JudgedSample) -> float:
            sample.response_ids.clear()
            sample.prompt_ids.append(99)
            return 1.0

    async def once(sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate(sample.prompt_ids)
        return sample

    stage = Stage(once, Meddler(), answer([7, 8]))
    await stage.run()
    assert (stage.sample.response_ids, stage.sample.prompt_ids) == ([7, 8], [1, 2, 3])
    assert stage.group.account == "ready"


@virtual
async def test_an_agent_that_never_asks_is_a_failure() -> None:
    """A loop that returns without a turn fails its sample, and for good when its attempts are used up."""  # P4

    async def idle(sample: Sample, _: AgentContext) -> Sample:
        return sample

    stage = Stage(idle, Judger())
    await stage.run()
    assert (stage.group.account, stage.group.reason, stage.sample.status) == ("failed", "agent_error", S.FAILED)


@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt(), BaseException("of its own")], ids=repr)
def test_an_agent_that_exits_fails_alone(ends: BaseException) -> None:
    """A loop that calls `sys.exit`, or raises what else is no `Exception`, ends its sample, not the service."""  # P12

    async def exits(_: Sample, __: AgentContext) -> Sample:
        raise ends

    @virtual
    async def run() -> None:
        stage = Stage(exits, Judger())
        await stage.run()
        assert (stage.group.account, stage.group.reason) == ("failed", "agent_error")

    run()


@virtual
async def test_an_answer_that_comes_after_the_agent_left_is_not_recorded() -> None:
    """A call that an agent left running when it returned adds nothing to what is judged."""  # P2
    left: list[asyncio.Task[Any]] = []

    async def leaves(sample: Sample, ctx: AgentContext) -> Sample:
        turn = await ctx.generate(sample.prompt_ids)
        left.append(asyncio.create_task(ctx.generate(sample.prompt_ids + turn.ids)))
        await asyncio.sleep(0)
        return sample

    async def slow() -> Any:
        await asyncio.sleep(10)
        return answer([66])

    stage = Stage(leaves, Judger(), answer([7, 8]), slow)
    await stage.run()
    await asyncio.wait(left)
    assert isinstance(left[0].exception(), RolloutError)
    assert (stage.sample.status, stage.sample.response_ids) == (S.COMPLETED, [7, 8])


@virtual
async def test_a_failure_is_counted_before_its_clean_up_has_ended() -> None:
    """P4 P14: a sample that is taken back while it cleans up has failed all the same; the clean-up goes on."""
    cleaned = list[float]()

    async def cleans_up(sample: Sample, ctx: AgentContext) -> Sample:
        async def clean() -> None:
            await asyncio.sleep(5.0)
            cleaned.append(asyncio.get_running_loop().time())

        ctx.work.on_end(clean)
        raise ValueError("broken")

    stage = Stage(cleans_up, Judger())
    await stage.run()
    assert (stage.sample.status, stage.sample.failures) == (S.FAILED, 2)
    assert (asyncio.get_running_loop().time(), cleaned) == (0.0, [])
    assert await stage.tasks.close(10.0) == ()
    assert cleaned == [5.0, 5.0]
