"""`python -m bench.judges`: what judge processes cost, and what judges that hang cost the others.

Case `fast`: synchronous judges a second that only compare, through `Judging` and its judge processes, over the calls a
second of a bare `ProcessPoolExecutor` with as many processes, the same samples and the same comparison; both have all
calls waiting from the start, and processes that are warm.

Case `hang`: 1 % of the judges hang. Wall time over what cannot be had for less: the same healthy judges alone, and the
timeouts of those that hang, shared by all processes. A healthy judgement that is lost or wrong ends the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from bench.judge_work import compare
from bench.report import Point, interleaved, print_report, progress
from rollout_svc.errors import SampleFailure
from rollout_svc.gate import Gate
from rollout_svc.judging import JudgeDesk, JudgedSample, Judging
from rollout_svc.judging.processes import JudgePool
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.tasks import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 5
PROCESSES = 2
"""Judge processes, as many as a service has by default."""
WARM_CALLS = 100

FAST_CALLS = 10_000
FAST_BOUND = 0.8

HANG_CALLS = 2000
HANG_EVERY = 100
"""One call in so many hangs."""
RUN_S = 0.002
"""What a healthy judge takes, in seconds: little enough to be sent ahead, behind one that hangs too."""
TIMEOUT_S = 0.5
"""What each judge may take, in seconds."""
HANG_BOUND = 1.2
AMPLE_S = 60.0


def sample(number: int, *, hangs: bool = False) -> JudgedSample:
    """Make a sample as large as one of 128 prompt tokens and 256 response tokens."""
    prompt, response = list(range(128)), list(range(1000, 1256))
    text = "hang" if hangs else str(number)
    return JudgedSample(f"s{number}", f"g{number // 8}", "t", None, prompt, text, response, str(number), {}, "stop")


class Court:
    """Judging in processes, warm."""

    def __init__(self, target: str, timeout_s: float, options: dict[str, float]) -> None:
        self.pool = JudgePool(PROCESSES)
        self.judging = Judging(gate=Gate(), tasks=TaskOwner(), processes=self.pool)
        spec = PluginSpec(target, dict(options))
        self.desk = JudgeDesk(name="bench", judger=construct(spec, "judger"), spec=spec, timeout_s=timeout_s)

    async def judge(self, one: JudgedSample) -> float | str:
        """Return the reward, or why there is none."""
        try:
            return (await self.judging.judge(self.desk, "train", [one]))[0].value
        except SampleFailure as failure:
            return failure.reason

    async def wall_s(self, samples: Sequence[JudgedSample], expected: list[float | str]) -> float:
        """Judge all of them, warm; returns how long that took, in seconds."""
        await asyncio.gather(*(self.judge(sample(number)) for number in range(WARM_CALLS)))
        begun = time.perf_counter()
        found = await asyncio.gather(*(self.judge(one) for one in samples))
        wall_s = time.perf_counter() - begun
        await self.pool.close()
        wrong = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if ours != theirs]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(samples)} judgements are wrong: {wrong[:3]}")
        return wall_s


async def _judge_all(
    target: str,
    timeout_s: float,
    options: dict[str, float],
    samples: Sequence[JudgedSample],
    expected: list[float | str],
) -> float:
    return await Court(target, timeout_s, options).wall_s(samples, expected)


def our_rate(samples: Sequence[JudgedSample]) -> float:
    """Judges a second through judge processes."""
    wall_s = asyncio.run(_judge_all("bench.judge_work:Compares", AMPLE_S, {}, samples, [1.0] * len(samples)))
    return len(samples) / wall_s


def bare_rate(samples: Sequence[JudgedSample]) -> float:
    """Calls a second of the standard library's pool."""
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compare, one) for one in samples[:WARM_CALLS]]:
            future.result()
        begun = time.perf_counter()
        futures = [pool.submit(compare, one) for one in samples]
        found = [future.result() for future in futures]
        wall_s = time.perf_counter() - begun
    assert found == [1.0] * len(samples)  # noqa: S101 - a bench's own check
    return len(samples) / wall_s


def fast(rounds: int) -> Point:
    """Measure case `fast`."""
    samples = [sample(number) for number in range(FAST_CALLS)]
    ours, bare = interleaved(lambda: our_rate(samples), lambda: bare_rate(samples), rounds)
    progress(f"fast: {FAST_CALLS} calls a round, {rounds} rounds: {ours:.0f} calls/s over {bare:.0f}")
    return Point("fast", ours, bare, FAST_BOUND, "higher")


def hang_s(*, hangs: bool) -> float:
    """Seconds for all judges, those that hang among them or not there at all."""
    chosen = [number for number in range(HANG_CALLS) if hangs or number % HANG_EVERY != HANG_EVERY // 2]
    samples = [sample(number, hangs=number % HANG_EVERY == HANG_EVERY // 2) for number in chosen]
    expected: list[float | str] = [
        "judge_timeout" if one.response == "hang" else float(number)
        for number, one in zip(chosen, samples, strict=True)
    ]
    options = {"run_s": RUN_S}
    return asyncio.run(_judge_all("bench.judge_work:SometimesHangs", TIMEOUT_S, options, samples, expected))


def hang(rounds: int) -> Point:
    """Measure case `hang`."""
    lost_s = HANG_CALLS / HANG_EVERY * TIMEOUT_S / PROCESSES
    wall_s, floor_s = interleaved(lambda: hang_s(hangs=True), lambda: hang_s(hangs=False) + lost_s, rounds)
    progress(f"hang: {HANG_CALLS} calls a round, {rounds} rounds: {wall_s:.2f} s over {floor_s:.2f} s")
    return Point("hang", wall_s, floor_s, HANG_BOUND)


def main() -> int:
    """Run both cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.judges", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    cases = {"fast": fast, "hang": hang}
    parser.add_argument("--only", nargs="+", choices=cases, help="these cases")
    options = parser.parse_args()
    points = [case(options.rounds) for name, case in cases.items() if options.only is None or name in options.only]
    return 0 if print_report("judges", points) else 1


if __name__ == "__main__":
    sys.exit(main())
