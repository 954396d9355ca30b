"""`python -m bench.stall`: what answers of 64 MiB with routed experts do to the loop, while 512 small requests run.

An engine process answers the small ones after 0.3 s in the mean; another one answers big ones at once, two at a time,
back to back. The client is a process too: the service's loop and its transport, the same in every measurement.

- `base64-lag`, `nested-lag`: p99.9 of the loop's lag while our transport lifts the experts out, over that while a bare
  client reads the same bytes and discards them.
- `base64-rate`: bytes of big answers a second, lifted and decoded, over those a bare client reads whole, and leaves.
- `small`: small answers a second beside big ones, base64 or nested, whichever leaves fewer, over those without any.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.stall.client import WAYS

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS: Final = 11
SECONDS: Final = 4.0
"""Of one measurement: 4,000 looks at the lag, of which the fourth largest is the p99.9."""
LAG_BOUND: Final = 3.0
RATE_BOUND: Final = 1.0
SMALL_BOUND: Final = 0.8
NEEDS: Final = {
    "base64-lag": ("lift-base64", "discard-base64"),
    "nested-lag": ("lift-nested", "discard-nested"),
    "base64-rate": ("lift-base64", "read-base64"),
    "small": ("lift-base64", "lift-nested", "none"),
}
"""What has to be measured for each case."""

Round = dict[str, dict[str, Any]]
"""What one round found, by way."""


def measure(ways: Sequence[str], rounds: int, seconds: float) -> list[Round]:
    """Play the rounds: in each, every way by turns."""
    found: list[Round] = []
    with (
        Child("bench.canned", "--port", 0, "--delay", 0.3, "--spread", "uniform", "--weight-version", 0) as small,
        Child("bench.stall.engine") as big,
    ):
        urls = [f"http://127.0.0.1:{engine.ready_line[0]}" for engine in (small, big)]
        flags = ("--ways", *ways, "--rounds", rounds, "--seconds", seconds)
        with Child("bench.stall.client", "--small", urls[0], "--big", urls[1], *flags, ready=None) as client:
            for number in range(rounds):
                found.append({way: client.read_json(60.0 + 4 * seconds) for way in ways})
                progress(f"round {number + 1} of {rounds}")
                for way, figures in found[-1].items():
                    progress(
                        f"  {way:15} lag p99.9 {figures['lag_p999_ms']:6.2f} ms, {figures['big_per_s'] / 2**20:7.1f} "
                        f"MiB/s, {figures['small_per_s']:7.1f} small/s"
                    )
    return found


def points(rounds: Sequence[Round], cases: Sequence[str]) -> list[Point]:
    """The figures as the report has them: medians of each side over the rounds."""

    def middle(figure: str, *ways: str) -> float:
        return median(min(float(found[way][figure]) for way in ways) for found in rounds)

    made = []
    for case in cases:
        *ours, floor = NEEDS[case]
        if case == "small":
            pair = middle("small_per_s", *ours), middle("small_per_s", floor)
            made.append(Point(case, *pair, SMALL_BOUND, "higher"))
        elif case == "base64-rate":
            pair = middle("big_per_s", *ours), middle("big_per_s", floor)
            made.append(Point(case, *pair, RATE_BOUND, "higher"))
        else:
            made.append(Point(case, middle("lag_p999_ms", *ours), middle("lag_p999_ms", floor), LAG_BOUND))
    return made


def main() -> int:
    """Run all cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.stall", description="The loop beside answers of 64 MiB.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="odd")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one measurement")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=NEEDS, help="these cases")
    options = parser.parse_args()
    cases = [case for case in NEEDS if options.only is None or case in options.only]
    ways = [way for way in WAYS if any(way in NEEDS[case] for case in cases)]
    raise_open_files()
    return 0 if print_report("stall", points(measure(ways, options.rounds, options.seconds), cases)) else 1


if __name__ == "__main__":
    sys.exit(main())
