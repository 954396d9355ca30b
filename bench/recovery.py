"""`python -m bench.recovery`: a worker is killed under load and comes back; how soon it has its full share of traffic.

Two engines run as many requests as they have slots. One is killed and starts again at its port after a while. Ours is
the time from its listening to its slots being busy; the floor is a bare client that opens as many connections to an
engine at once and sends as many requests. Case `lost`: samples that were not answered in the end, over those under way
at the engine when it was killed.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import orjson

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import GROUP_SIZE, Served, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS: Final = 5
MEAN_S: Final = 2.0
"""Mean duration of a request."""
FULL: Final = 0.98
"""Share of the slots that are busy when it has its full share: some are always between two requests."""
STEADY_S: Final = 1.0
"""Under full load before the kill, seconds: the breaker has forgotten the round before."""
POLL_S: Final = 0.01
"""Between two looks at an engine, which sends no event, seconds."""
FILL_TIMEOUT_S: Final = 120.0
STALENESS: Final = 7
"""As in `bench.refill`: the trainer holds nothing up."""


@dataclass(frozen=True, slots=True)
class Case:
    """Two workers of that many slots; one is away for a while, seconds."""

    slots: int
    away_s: float

    @property
    def name(self) -> str:
        """As the report spells it."""
        return f"{self.slots}x2-away-{self.away_s:g}s"


CASES: Final = (Case(64, 3.0), Case(1024, 3.0), Case(64, 20.0))


class Worker:
    """An engine that can be killed and comes back at its port."""

    def __init__(self) -> None:
        self._child = self._start(0)
        self.port = int(self._child.ready_line[0])

    @staticmethod
    def _start(port: int) -> Child:
        flags = ("--delay", MEAN_S, "--spread", "uniform", "--weight-version", 0)
        return Child("bench.canned", "--port", port, *flags).__enter__()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Requests under way there."""
        with urlopen(f"{self.url}/busy", timeout=FILL_TIMEOUT_S) as response:  # noqa: S310 - our child
            return int(orjson.loads(response.read())["running"])

    def until(self, running: float) -> float:
        """Wait until it runs as many requests; returns how long that took, in seconds.

        Raises:
            TimeoutError: it does not within two minutes.
        """
        start = time.perf_counter()
        while (found := self.running) < running:
            if time.perf_counter() - start > FILL_TIMEOUT_S:
                raise TimeoutError(f"{found} of {running:g} requests are under way")
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def kill(self) -> None:
        """End it as a crash does."""
        self._child.kill()

    def come_back(self) -> None:
        """Start another process at its port; returns once that listens."""
        self._child = self._start(self.port)

    def close(self) -> None:
        """End it; idempotent."""
        self._child.terminate()


def ours(case: Case, workers: Sequence[Worker]) -> tuple[float, int]:
    """One round: seconds until the second worker, killed under load, has its share again; requests it ran."""
    for worker in workers:
        worker.until(FULL * case.slots)
    time.sleep(STEADY_S)
    struck = workers[1]
    running = struck.running
    struck.kill()
    time.sleep(case.away_s)
    struck.come_back()
    return struck.until(FULL * case.slots), running


def floor(engine_url: str, count: int) -> float:
    """Seconds in which a bare client gives an engine as many requests."""
    with Child("bench.floor", "--url", engine_url, "--fill", count, ready=None) as child:
        return float(child.read_json(FILL_TIMEOUT_S)["elapsed_s"])


def lost(served: Served) -> int:
    """Samples that ended without an answer, or that no account has."""
    samples: dict[str, Any] = orjson.loads(served.call("GET", "/v1/status"))["ledger"]["samples"]
    ended = samples["failed"] + samples["expired"] + samples["filtered"]
    return int(ended + abs(samples["admitted"] - sum(count for name, count in samples.items() if name != "admitted")))


def run(case: Case, rounds: int) -> tuple[Point, int, int]:
    """Measure one case, by turns; also samples lost, and requests that were under way when their engine died."""
    with ExitStack() as stack:
        holding = stack.enter_context(Child("bench.canned", "--hold"))
        workers = [Worker(), Worker()]
        for worker in workers:
            stack.callback(worker.close)
        urls = [worker.url for worker in workers]
        served = stack.enter_context(Served(urls, case.slots, max_staleness=STALENESS))
        stack.enter_context(Trainer(served.url, case.slots // GROUP_SIZE))
        pairs, struck = [], 0
        for _ in range(rounds):
            back_s, running = ours(case, workers)
            struck += running
            pairs.append((back_s, floor(f"http://127.0.0.1:{holding.ready_line[0]}", case.slots)))
            progress(f"{case.name}: {back_s:.2f} s over {pairs[-1][1]:.2f} s; {running} requests struck")
        missing = lost(served)
    return Point(case.name, median(p[0] for p in pairs), median(p[1] for p in pairs)), missing, struck


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="these cases")
    options = parser.parse_args()
    raise_open_files()
    found = [run(case, options.rounds) for case in CASES if options.only is None or case.name in options.only]
    missing, struck = sum(each[1] for each in found), sum(each[2] for each in found)
    return 0 if print_report("recovery", [*(each[0] for each in found), Point("lost", missing, struck, 0.0)]) else 1


if __name__ == "__main__":
    sys.exit(main())
