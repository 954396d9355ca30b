"""`python -m bench.refill`: how much of the time the engines' slots are busy.

A worker's limit is its number of slots, so that no request waits within an engine: a slot whose request has ended
stays empty until the next one has come all the way. The share is busy slot-seconds over all slot-seconds, by the
clock of the engines, from one mean duration after the start to the end. All busy, 1.0, is what it is held against.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import orjson

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import Served, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUND: Final = 0.98
ALL: Final = 1.0
"""The floor: every slot-second a busy one."""
ROUNDS: Final = 5
MEAN_S: Final = 2.0
LONG_MEAN_S: Final = 20.0
"""Mean duration where there are more slots than `LARGE`: what one process can refill."""
LARGE: Final = 1024
"""Slots in all workers together."""
WINDOW_MEANS: Final = 3
"""Length of a window in mean durations; one of the long ones, of which it takes 20 s to fill as many slots."""
LONG_WINDOW_MEANS: Final = 1
STALENESS: Final = 7
"""Groups admitted and not yet consumed may be eight times those that run at once. A group of eight is under way until
its longest answer is there, about three mean durations where they are lognormal, and then it waits to be taken."""
BATCHES_A_MEAN: Final = 8
"""Batches that the trainer takes in one mean duration."""
PARTIAL_TOKENS: Final = 1
"""Of a request cut by the pause between two rounds: its budget hardly shrinks."""
LOOK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is run.

    Attributes:
        spread: How durations are drawn: uniform from 0 to twice the mean, or lognormal with sigma 1.2.
        group_size: Samples of a prompt.
        slots: Of each worker.
        workers: How many there are.
    """

    spread: str
    group_size: int
    slots: int
    workers: int

    @property
    def name(self) -> str:
        """As the report spells it."""
        return f"{self.spread}-n{self.group_size}-{self.slots}x{self.workers}"

    @property
    def all_slots(self) -> int:
        """Of all workers."""
        return self.slots * self.workers

    @property
    def mean_s(self) -> float:
        """Mean duration of a request, seconds."""
        return MEAN_S if self.all_slots <= LARGE else LONG_MEAN_S

    @property
    def window_s(self) -> float:
        """Time over which busy slots are counted, seconds."""
        return self.mean_s * (WINDOW_MEANS if self.all_slots <= LARGE else LONG_WINDOW_MEANS)


CASES: Final = tuple(Case(*values) for values in product(("uniform", "lognormal"), (1, 8), (64, 1024), (1, 8)))


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy slot-seconds of some engines so far, and when each of them counted."""

    busy_s: tuple[float, ...]
    at_s: tuple[float, ...]

    def share_since(self, before: Busy, slots: int) -> float:
        """Busy slot-seconds since then, over all slot-seconds since then."""
        spans = [now - then for now, then in zip(self.at_s, before.at_s, strict=True)]
        return (sum(self.busy_s) - sum(before.busy_s)) / (slots * sum(spans))


def look(urls: Sequence[str], slots: int) -> Busy:
    """Ask every engine.

    Raises:
        RuntimeError: an engine had more requests than slots: its surplus would have waited, and counts here as busy.
    """
    answers: list[dict[str, Any]] = []
    for url in urls:
        with urlopen(f"{url}/busy", timeout=LOOK_TIMEOUT_S) as response:  # noqa: S310 - our child
            answers.append(orjson.loads(response.read()))
    most = max(answer["max_running"] for answer in answers)
    if most > slots:
        raise RuntimeError(f"{most} requests at once at an engine of {slots} slots")
    return Busy(tuple(a["busy_s"] for a in answers), tuple(a["at_s"] for a in answers))


def measure(case: Case, served: Served, urls: Sequence[str]) -> float:
    """One round: start, wait for one mean duration, count over the window, stop."""
    served.call("POST", "/v1/resume", {})
    time.sleep(case.mean_s)
    before, cpu_s = look(urls, case.slots), served.cpu_s
    time.sleep(case.window_s)
    share = look(urls, case.slots).share_since(before, case.slots)
    load = (served.cpu_s - cpu_s) / case.window_s
    served.call("POST", "/v1/pause", {})
    progress(f"{case.name}: {share:.4f} busy; the service used {load:.0%} of a processor")
    return share


def bare(case: Case) -> float:
    """What a bare client reaches on this machine at this moment: where that is low as well, it is not our doing."""
    with Child("bench.canned", "--engines", case.workers, "--spread", case.spread, "--delay", case.mean_s) as engines:
        urls = [f"http://127.0.0.1:{port}" for port in engines.ready_line]
        with Child("bench.floor", "--keep", case.slots, "--url", *urls, ready=None):
            time.sleep(case.mean_s)
            before = look(urls, case.slots)
            time.sleep(case.window_s)
            share = look(urls, case.slots).share_since(before, case.slots)
    progress(f"{case.name}: {share:.4f} busy with a bare client")
    return share


def run(case: Case, rounds: int) -> Point:
    """Measure one case; each round is a start of its own."""
    flags = ("--spread", case.spread, "--delay", case.mean_s, "--partial-tokens", PARTIAL_TOKENS, "--weight-version", 0)
    with Child("bench.canned", "--engines", case.workers, *flags) as engines:
        urls = [f"http://127.0.0.1:{port}" for port in engines.ready_line]
        with Served(urls, case.slots, group_size=case.group_size, max_staleness=STALENESS) as served:
            groups = max(1, case.all_slots // case.group_size // BATCHES_A_MEAN)
            with Trainer(served.url, groups):
                served.call("POST", "/v1/pause", {})
                shares = [measure(case, served, urls) for _ in range(rounds)]
    return Point(case.name, median(shares), ALL, BOUND, "higher")


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.refill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="these cases")
    parser.add_argument("--bare", action="store_true", help="run a bare client as well, once a case, and say its share")
    options = parser.parse_args()
    raise_open_files()
    cases = [case for case in CASES if options.only is None or case.name in options.only]
    points = []
    for case in cases:
        points.append(run(case, options.rounds))
        if options.bare:
            bare(case)
    return 0 if print_report("refill", points) else 1


if __name__ == "__main__":
    sys.exit(main())
