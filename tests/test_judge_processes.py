"""Synchronous judgers in real processes: killed at their timeout, at a pause, and never missed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_svc.errors import Interrupted, SampleFailure
from rollout_svc.gate import LANES, Gate
from rollout_svc.judging import JudgeDesk, Judging, Reward
from rollout_svc.judging.processes import JudgePool
from rollout_svc.judging.processes.gathered import MOST_THREADS, TIMES
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.tasks import TaskOwner
from tests.support.court import a_sample
from tests.support.processes import lives, parent, read_pids, until

pytestmark = pytest.mark.asyncio(loop_scope="module")  # what the pool starts belongs to one loop

AMPLE_S = 30.0  # a timeout that no test runs into
SHORT_S = 0.4  # one that a hung judge does

TAKES = "tests.support.judgers:Takes"
HANGS = "tests.support.judgers:Hangs"
HOSTILE = "tests.support.judgers_hostile:Hostile"
BREAKS = "tests.support.judgers:Breaks"
COUNTS = "tests.support.judgers:Counts"
REGEX = "rollout_judgers.regex:Regex"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner() -> AsyncIterator[JudgePool]:
    """One process for all tests: each must leave it, or its successor, in order."""
    made = JudgePool(max_workers=1)
    yield made
    await made.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe by which a judger says that it runs."""
    path = tmp_path / "pid"
    os.mkfifo(path)
    return path


class Bench:
    """Judging by real processes."""

    def __init__(self, runner: JudgePool) -> None:
        self.judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=runner)

    async def judge(self, target: str, timeout_s: float = AMPLE_S, /, **options: Any) -> Reward:
        spec = PluginSpec(target, options)
        desk = JudgeDesk(name="j", judger=construct(spec, "judger"), spec=spec, timeout_s=timeout_s)
        async with asyncio.timeout(AMPLE_S):
            [reward] = await self.judging.judge(desk, "train", [a_sample()])
        return reward

    async def failure(self, target: str, timeout_s: float = AMPLE_S, /, **options: Any) -> SampleFailure:
        with pytest.raises(SampleFailure) as caught:
            await self.judge(target, timeout_s, **options)
        return caught.value

    async def reason(self, target: str, timeout_s: float = AMPLE_S, /, **options: Any) -> str:
        with pytest.raises(SampleFailure) as caught:
            await self.judge(target, timeout_s, **options)
        return caught.value.reason


@pytest.fixture
def bench(runner: JudgePool) -> Bench:
    """Judging by the one process there is."""
    return Bench(runner)


async def ended(pid: int) -> None:
    """Return once that process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), AMPLE_S)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def test_a_verdict_comes_back(bench: Bench) -> None:
    """Only values cross: the sample goes there, a Reward with its parts comes back."""
    assert await bench.judge(TAKES, value=0.5) == Reward(0.5)
    reward = await bench.judge(COUNTS)
    assert reward.parts["pid"] != os.getpid()


async def test_a_judger_is_made_once_per_process(bench: Bench) -> None:
    """Its set-up is paid once, however many samples it sees."""
    one, other = await bench.judge(COUNTS), await bench.judge(COUNTS)
    assert one == other
    assert one.value == 1.0


async def test_a_hung_judge_is_killed_at_its_timeout(bench: Bench, fifo: Path) -> None:
    """The process is gone, and the next call gets another one."""  # P21
    call = asyncio.create_task(bench.reason(HANGS, SHORT_S, fifo=str(fifo)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    assert await call == "judge_timeout"
    await ended(pid)
    reward = await bench.judge(COUNTS)
    assert reward.parts["pid"] != pid


async def test_a_pattern_that_backtracks_for_ever_is_killed(bench: Bench) -> None:
    """A regular expression that would run for years costs its timeout."""  # P21
    spec = PluginSpec(REGEX, {"pattern": "(x+x+)+y"})
    desk = JudgeDesk(name="regex", judger=construct(spec, "judger"), spec=spec, timeout_s=SHORT_S)
    sample = a_sample(response="x" * 100)
    with pytest.raises(SampleFailure, match="judge_timeout"):
        await bench.judging.judge(desk, "train", [sample])


async def test_queueing_for_a_process_is_not_counted(bench: Bench) -> None:
    """Two calls in one process that together take longer than their timeout both keep it."""  # P21
    calls = [bench.judge(TAKES, 0.6, seconds=0.4, value=value) for value in (0.0, 0.5)]
    assert [reward.value for reward in await asyncio.gather(*calls)] == [0.0, 0.5]


async def test_a_pause_kills_a_running_judge(bench: Bench, fifo: Path) -> None:
    """Interrupting ends the caller at once and the process soon after."""  # P13
    call = asyncio.create_task(bench.judge(HANGS, fifo=str(fifo)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    assert bench.judging.interrupt(LANES, 10) == 1
    with pytest.raises(Interrupted):
        await call
    await ended(pid)
    assert await bench.judge(TAKES) == Reward(1.0)


async def test_cancelling_the_caller_kills_the_judge(bench: Bench, fifo: Path) -> None:
    """Nobody waits for the verdict any more: nothing computes it."""  # P14
    call = asyncio.create_task(bench.judge(HANGS, fifo=str(fifo)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await ended(pid)


@pytest.mark.parametrize(
    "how",
    [
        "raises",
        "sample_failure",
        "unpicklable_error",
        "unpicklable_result",
        "unloadable_result",
        "exits",
        "dies",
    ],
)
async def test_whatever_breaks_in_there_is_a_typed_failure(bench: Bench, how: str) -> None:
    """An error, a result or an end that does not cross between processes fails that sample, and nobody else."""  # P12
    assert await bench.reason(BREAKS, 5.0, how=how) == "judge_error"
    assert await bench.judge(TAKES) == Reward(1.0)


async def test_what_was_raised_is_told(bench: Bench) -> None:
    """People read which error it was, also where the error itself could not cross."""
    for how, told in (("raises", "as told"), ("sample_failure", "as told"), ("unpicklable_error", "two parts")):
        with pytest.raises(SampleFailure, match=told):
            await bench.judge(BREAKS, how=how)


async def test_a_reason_of_the_judgers_own_crosses(bench: Bench) -> None:
    """A JudgeFailed says the same from a process as in the loop; any other error says where it was raised."""
    with pytest.raises(SampleFailure) as caught:
        await bench.judge(BREAKS, how="judge_failed")
    assert str(caught.value) == "judge_error: j: no_tests: as told"
    with pytest.raises(SampleFailure, match=r"ValueError: as told \(.*tests/support/judgers\.py:\d+ in judge\)"):
        await bench.judge(BREAKS, how="raises")


async def test_a_sample_that_cannot_be_sent_is_a_typed_failure(bench: Bench) -> None:
    """A ground truth of a kind that does not cross fails its sample, and nobody else."""  # P12
    spec = PluginSpec(TAKES, {})
    desk = JudgeDesk(name="j", judger=construct(spec, "judger"), spec=spec, timeout_s=AMPLE_S)
    with pytest.raises(SampleFailure, match="judge_error"):
        await bench.judging.judge(desk, "train", [a_sample(truth=lambda: 1)])
    assert await bench.judge(TAKES) == Reward(1.0)


async def test_a_process_killed_while_idle_is_replaced(bench: Bench) -> None:
    """Somebody else's kill costs no more than the calls it met: judging goes on."""  # P23
    reward = await bench.judge(COUNTS)
    pid = int(reward.parts["pid"])
    os.kill(pid, signal.SIGKILL)
    await ended(pid)
    for _ in range(100):
        try:
            assert (await bench.judge(COUNTS)).parts["pid"] != pid
        except SampleFailure as failure:
            assert failure.reason == "judge_error"  # noqa: PT017 - it may fail so, and then is asked again
        else:
            return
    raise AssertionError("no process came back")


async def test_closing_ends_what_runs(fifo: Path) -> None:
    """A runner that closes kills its processes; closing again, or unused, does nothing."""
    runner = JudgePool(max_workers=1)
    await runner.close()
    bench = Bench(runner)
    call = asyncio.create_task(bench.reason(HANGS, fifo=str(fifo)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    await runner.close()
    await ended(pid)
    assert await call == "judge_error"
    await runner.close()


async def test_closing_answers_a_call_that_no_process_has_begun() -> None:
    """A call that still waits for a process to start when the runner closes fails; it does not wait for ever."""
    runner = JudgePool(max_workers=1)
    call = runner.submit(PluginSpec(TAKES, {}), "judge", a_sample(), AMPLE_S)
    waiting = [runner.submit(PluginSpec(TAKES, {}), "judge", a_sample(), AMPLE_S) for _ in range(3)]
    await runner.close()
    async with asyncio.timeout(AMPLE_S):
        outcomes = await asyncio.gather(call, *waiting, return_exceptions=True)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes  # a verdict of "failed", each


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("swallows", "judge_timeout", r"no verdict in 0.4 s \(.*judgers_hostile.py:\d+ in swallows\)"),
        ("deaf", "judge_timeout", "no verdict in 0.4 s"),
        ("interrupts", "judge_error", r"KeyboardInterrupt: as told \(.*judgers_hostile.py:\d+ in interrupts\)"),
        ("huge", "judge_error", "its result takes 33554"),
        ("rants", "judge_error", r"ValueError: x{1900,} \(.*judgers_hostile.py:\d+ in rants\)"),
        ("segfaults", "judge_error", r"ended by SIGSEGV \(.*judgers_hostile.py:\d+ in segfaults\)"),
        ("closes", "judge_error", "its process"),
        ("babbles", "judge_error", "its process wrote what is no answer"),
        ("recurses", "judge_error", r"RecursionError.*judgers_hostile.py:\d+ in recurses"),
        ("says_it_is_spent", "judge_error", "its process answered what it was not asked"),
        ("kills_its_parent", "judge_error", "its process was ended"),
    ],
)
async def test_a_hostile_judge_fails_its_own_sample_only(bench: Bench, how: str, reason: str, told: str) -> None:
    """Whatever it does to its process, its sample fails with reason and line; the next is judged."""  # P12
    failure = await bench.failure(HOSTILE, SHORT_S, how=how)
    assert failure.reason == reason
    assert re.search(told, str(failure)), failure
    assert await bench.judge(TAKES) == Reward(1.0)


async def test_whoever_waits_behind_a_hostile_judge_is_judged(bench: Bench) -> None:
    """P12: it ends all judge processes; what had not begun waits for the next ones, and fails for nothing."""
    hostile = asyncio.create_task(bench.failure(HOSTILE, how="kills_its_parent"))
    behind = await asyncio.gather(*(bench.judge(TAKES, value=value) for value in (0.25, 0.5, 0.75)))
    assert [reward.value for reward in behind] == [0.25, 0.5, 0.75]
    assert (await hostile).reason == "judge_error"


@pytest.mark.parametrize("how", ["prints", "forks"])
async def test_a_judge_that_only_makes_noise_is_heard(
    bench: Bench, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its verdict counts, once; what it prints is not on our standard output."""
    assert await bench.judge(HOSTILE, how=how) == Reward(1.0)
    assert await bench.judge(TAKES, value=0.5) == Reward(0.5)
    assert capfd.readouterr().out == ""


async def test_a_fork_of_a_judge_never_speaks_for_it(bench: Bench) -> None:
    """One answer, not two, and no call is read by the copy: the same process goes on judging."""  # P21
    before = await bench.judge(COUNTS)
    assert await bench.judge(HOSTILE, how="forks") == Reward(1.0)
    after = [await bench.judge(COUNTS) for _ in range(20)]
    assert {reward.parts["pid"] for reward in after} == {before.parts["pid"]}


@pytest.mark.parametrize("how", ["leaves_children_and_hangs", "leaves_children_and_dies"])
async def test_what_a_judge_started_ends_with_it(bench: Bench, how: str, tmp_path: Path) -> None:
    """Its child, and a daemon in a session of its own that hears no signal, are gone when that is told."""  # P21
    pids = tmp_path / "pids"
    with pytest.raises(SampleFailure):
        await bench.judge(HOSTILE, 1.0, how=how, pids=str(pids))
    left = [int(line) for line in pids.read_text().split()]
    assert len(left) == 2
    assert not [pid for pid in left if lives(pid)]


async def test_what_is_left_at_call_after_call_is_ended(bench: Bench, tmp_path: Path) -> None:
    """A judger that leaves processes behind does not fill the machine; one that keeps what it started once keeps it."""
    left, kept = tmp_path / "left", tmp_path / "kept"
    for _ in range(TIMES):
        assert await bench.judge(HOSTILE, how="leaves_children", pids=str(left)) == Reward(1.0)
    pids = [int(line) for line in left.read_text().split()]
    assert len(pids) >= TIMES  # the child of each call; a daemon may have been ended before it said its number
    for pid in pids:
        await ended(pid)
    for _ in range(3 * TIMES):
        assert await bench.judge(HOSTILE, how="keeps_one", pids=str(kept)) == Reward(1.0)
    [pid] = await asyncio.to_thread(read_pids, kept, 1)
    assert lives(pid)


async def test_threads_that_are_left_at_call_after_call_end_with_their_process(bench: Bench) -> None:
    """No thread can be ended, so the process is, between two calls: also those in its line have verdicts."""  # P21
    before = (await bench.judge(COUNTS)).parts["pid"]
    enough = MOST_THREADS + TIMES
    calls = [bench.judge(HOSTILE, how="leaves_thread") for _ in range(2 * enough)]
    assert await asyncio.gather(*calls) == [Reward(1.0)] * len(calls)
    after = (await bench.judge(COUNTS)).parts["pid"]
    assert after != before
    for _ in range(3 * TIMES):
        assert await bench.judge(HOSTILE, how="prints") == Reward(1.0)
    assert (await bench.judge(COUNTS)).parts["pid"] == after


async def test_closing_ends_what_judges_left(tmp_path: Path) -> None:
    """A daemon of a judge that answered long ago does not outlive the pool."""
    runner = JudgePool(max_workers=1)
    pids = tmp_path / "pids"
    assert await Bench(runner).judge(HOSTILE, how="leaves_children", pids=str(pids)) == Reward(1.0)
    left = await asyncio.to_thread(read_pids, pids, 2)
    assert all(lives(pid) for pid in left)
    await runner.close()
    assert not [pid for pid in left if lives(pid)]


async def test_a_flooded_queue_counts_against_nobody() -> None:
    """200 calls that take far longer than their timeout together, and 4 that hang: each has its own end."""  # P21
    runner = JudgePool(max_workers=2)
    bench = Bench(runner)

    async def one(number: int) -> Any:
        if number % 50 == 7:
            return (await bench.failure(HOSTILE, 0.2, how="swallows")).reason
        return (await bench.judge(TAKES, 0.2, seconds=0.005, value=float(number))).value

    outcomes = await asyncio.gather(*(one(number) for number in range(200)))
    assert outcomes == ["judge_timeout" if number % 50 == 7 else float(number) for number in range(200)]
    await runner.close()


KILLED = """
import asyncio, sys
from rollout_svc.judging.processes import JudgePool
from rollout_svc.judging.processes.gathered import TIMES
from rollout_svc.plugins import PluginSpec
from tests.support.court import a_sample

async def main():
    options = {"how": "leaves_children_and_hangs", "pids": sys.argv[1]}
    spec = PluginSpec("tests.support.judgers_hostile:Hostile", options)
    await JudgePool(max_workers=2).submit(spec, "judge", a_sample(), 600)

asyncio.run(main())
"""


async def test_nothing_outlives_a_service_that_is_killed(tmp_path: Path) -> None:
    """After `kill -9` of the service its judge processes are gone, and so is all that those started."""  # P21
    await asyncio.to_thread(_kill_a_service, tmp_path / "pids")


def _kill_a_service(pids: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(pids)]) as service:
        left = read_pids(pids, 2)
        judges = [parent(pid) for pid in left]
        service.kill()
    until(lambda: not any(lives(pid) for pid in (*left, *judges)), "all of them are gone")
