"""`python -m bench.journal`: what a journal costs, in completed samples per second.

Two services of the same settings, one with `buffer.path`, have the same engine by turns. A trainer takes and
acknowledges as fast as batches come, so that nothing but the service limits it: the engine answers after 50 ms with
256 tokens and their logprobs, which is what the journal then writes. The value is the one with the journal, the floor
the one without.

Before that a journal is filled with 100,000 finished samples, its service is killed, and the time that the next one
takes to have them all again is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import orjson

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import GROUP_SIZE, Served

BOUND: Final = 0.8
ROUNDS: Final = 5
DELAY_S: Final = 0.05
IN_FLIGHT: Final = 256
BATCH: Final = IN_FLIGHT // GROUP_SIZE  # the config's train_batch_size
STALENESS: Final = 7
"""Groups admitted and not yet consumed may be eight times those that run: a trainer that never holds producing up."""
WARM_BATCHES: Final = 8
BATCHES: Final = 32
"""Batches of one round: 8,192 samples."""
RECOVERED: Final = 100_000
FILL_S: Final = 600.0
"""How long filling the journal may take."""
LOOK_S: Final = 0.2


def rate(served: Served) -> float:
    """Completed samples per second, taken and acknowledged; warm."""
    served.call("POST", "/v1/resume", {})
    for _ in range(WARM_BATCHES):
        served.take(BATCH)
    began = time.monotonic()
    for _ in range(BATCHES):
        served.take(BATCH)
    took_s = time.monotonic() - began
    served.call("POST", "/v1/pause", {})
    return BATCHES * BATCH * GROUP_SIZE / took_s


def compare(url: str, folder: Path, rounds: int) -> Point:
    """Measure both, by turns."""
    with (
        Served([url], IN_FLIGHT, journal=folder / "rate.db", max_staleness=STALENESS) as journalled,
        Served([url], IN_FLIGHT, max_staleness=STALENESS) as memory,
    ):
        for served in (journalled, memory):
            served.call("POST", "/v1/pause", {})
        pairs, spent = [], []
        for number in range(rounds):
            before = journalled.cpu_s, memory.cpu_s
            pair = rate(journalled), rate(memory)
            samples = (BATCHES + WARM_BATCHES) * BATCH * GROUP_SIZE
            spent = [1000 * (now - then) / samples for now, then in zip((journalled.cpu_s, memory.cpu_s), before)]  # noqa: B905
            pairs.append(pair)
            cpu = f"{spent[0]:.3f} and {spent[1]:.3f} ms of CPU each"
            progress(f"journalled: round {number + 1} of {rounds}: {pair[0]:.0f}/s over {pair[1]:.0f}/s; {cpu}")
    return Point("journalled", median(p[0] for p in pairs), median(p[1] for p in pairs), BOUND, "higher")


def ready(served: Served) -> int:
    """Samples of the groups that are finished, and in the journal."""
    return GROUP_SIZE * int(orjson.loads(served.call("GET", "/v1/status"))["ledger"]["groups"]["ready"])


def recover(url: str, folder: Path, samples: int) -> None:
    """Fill a journal, kill its service, and print how long the next takes to have everything."""
    journal = folder / "recovery.db"
    groups = -(-samples // GROUP_SIZE)
    staleness = -(-groups // BATCH) - 1  # so many groups may be admitted and not yet consumed
    with Served([url], IN_FLIGHT, journal=journal, max_staleness=staleness) as served:
        end = time.monotonic() + FILL_S
        while ready(served) < samples:
            if time.monotonic() > end:
                raise TimeoutError(f"{ready(served)} of {samples} samples within {FILL_S:g} s")
            time.sleep(LOOK_S)
        served.kill()
    megabytes = sum(path.stat().st_size for path in folder.glob("recovery.db*")) / 1e6
    empty_s = start_s(url, folder / "empty.db", staleness)
    began = time.monotonic()
    with Served([url], IN_FLIGHT, journal=journal, max_staleness=staleness) as served:
        took_s = time.monotonic() - began
        found = ready(served)
    if found < samples:
        raise RuntimeError(f"{found} of {samples} samples came back")
    progress(
        f"recovery: {found} samples of {megabytes:.0f} MB in {took_s - empty_s:.2f} s,"
        f" beside the {empty_s:.2f} s that a start takes"
    )


def start_s(url: str, journal: Path, staleness: int) -> float:
    """Seconds that a start takes with an empty journal."""
    began = time.monotonic()
    with Served([url], IN_FLIGHT, journal=journal, max_staleness=staleness):
        return time.monotonic() - began


def main() -> int:
    """Run the case and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.journal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--recovered", type=int, default=RECOVERED, help="samples of the recovery; 0: leave it out")
    options = parser.parse_args()
    raise_open_files()
    flags = ("--port", 0, "--delay", DELAY_S, "--weight-version", 0)
    with Child("bench.canned", *flags) as engine, TemporaryDirectory(prefix="bench-") as made:
        url, folder = f"http://127.0.0.1:{engine.ready_line[0]}", Path(made)
        if options.recovered:
            recover(url, folder, options.recovered)
        point = compare(url, folder, options.rounds)
    return 0 if print_report("journal", [point]) else 1


if __name__ == "__main__":
    sys.exit(main())
