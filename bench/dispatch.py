"""`python -m bench.dispatch`: what a sample costs the service, over what it costs a bare client.

One engine process answers both after 0.3 s with the same bodies (128 prompt tokens, 256 response tokens with logprobs),
in SGLang's dialect (cases `64`, …), in vLLM's (`vllm-64`, …) and in LMDeploy's (`lmdeploy-64`, …).
Ours is the CPU time of the service process per sample that went the whole way: prompt, agent, worker, HTTP, judge,
buffer, batch, acknowledgement. The floor is a bare aiohttp + orjson client that builds and parses the same bodies.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import orjson

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import GROUP_SIZE, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

DIALECTS = ("sglang", "vllm", "lmdeploy")
IN_FLIGHT = (64, 512, 2048)
BOUND = 2.0
GROWTH_BOUND = 1.2
ROUNDS = 5
WINDOWS = 6
"""In-flight windows measured in one round: enough that start and end do not show."""
WARM_BATCHES = 3
LEAST_SAMPLES = 1280
"""Samples of one round at least: 64 in flight would give too few for a clock of CPU time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine of a dialect, and how many requests it has under way."""

    dialect: str
    in_flight: int

    @property
    def name(self) -> str:
        """As the report spells it."""
        return str(self.in_flight) if self.dialect == "sglang" else f"{self.dialect}-{self.in_flight}"


CASES = tuple(Case(dialect, in_flight) for dialect in DIALECTS for in_flight in IN_FLIGHT)


def ours(served: Served, in_flight: int) -> float:
    """CPU of the service per sample, in ms, at `in_flight` requests under way; warm."""
    served.call("POST", "/v1/resume", {})
    batch = in_flight // GROUP_SIZE  # the config's train_batch_size
    for _ in range(WARM_BATCHES):
        served.take(batch)
    before_s, before = served.cpu_s, answered(served)
    taken = 0
    while taken < max(LEAST_SAMPLES, WINDOWS * in_flight):
        served.take(batch)
        taken += batch * GROUP_SIZE
    after_s, after = served.cpu_s, answered(served)
    served.call("POST", "/v1/pause", {})
    # What was taken may have been produced before the window, or the reverse: the smaller count is the work done.
    return 1000 * (after_s - before_s) / min(taken, after - before)


def answered(served: Served) -> int:
    """Samples that were judged so far."""
    samples = orjson.loads(served.call("GET", "/v1/status"))["ledger"]["samples"]
    return int(samples["ready"] + samples["leased"] + samples["consumed"])


def floor(engine_url: str, case: Case) -> float:
    """CPU of the bare client per request, in ms, likewise."""
    total = max(LEAST_SAMPLES, WINDOWS * case.in_flight)
    arguments = ("--url", engine_url, "--in-flight", case.in_flight, "--total", total, "--dialect", case.dialect)
    with Child("bench.floor", *arguments, ready=None) as child:
        return float(child.read_json(60.0)["cpu_ms_per_request"])


def run(case: Case, rounds: int) -> Point:
    """Measure one case, by turns."""
    flags = ("--dialect", case.dialect, "--weight-version", 0)
    with Child("bench.canned", "--port", 0, "--delay", 0.3, *flags) as engine:
        url = f"http://127.0.0.1:{engine.ready_line[0]}"
        with Served([url], case.in_flight, dialect=case.dialect) as served:
            pairs = []
            for number in range(rounds):
                pair = ours(served, case.in_flight), floor(url, case)
                pairs.append(pair)
                progress(f"{case.name}: round {number + 1} of {rounds}: {pair[0]:.3f} ms over {pair[1]:.3f} ms")
    return Point(case.name, median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), BOUND)


def growth(points: Sequence[Point]) -> list[Point]:
    """How much dearer than the floor a sample gets from the least to the most in flight, where both were measured."""
    ratio = {point.case: point.ratio for point in points}
    found = []
    for dialect in DIALECTS:
        least, most = (Case(dialect, in_flight).name for in_flight in (IN_FLIGHT[0], IN_FLIGHT[-1]))
        if least in ratio and most in ratio:
            name = least.removesuffix(str(IN_FLIGHT[0])) + "growth"
            found.append(Point(name, ratio[most], ratio[least], GROWTH_BOUND))
    return found


def main() -> int:
    """Run all cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="these cases")
    options = parser.parse_args()
    raise_open_files()
    points = [run(case, options.rounds) for case in CASES if options.only is None or case.name in options.only]
    return 0 if print_report("dispatch", [*points, *growth(points)]) else 1


if __name__ == "__main__":
    sys.exit(main())
