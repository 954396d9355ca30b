"""`python -m tests.durability [--rounds 200] [--seed 0]`: kill -9 at random moments of a loaded service.

Prints a table at its end; exits 1 with the first broken promise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median

from tests.durability.campaign import MOMENTS, Tally, run


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this is a command


def _table(tally: Tally, took_s: float) -> list[str]:
    rows = [f"{'killed in':12} {'rounds':>7} {'unanswered':>11}"]
    rows += [f"{name:12} {tally.kills[name]:7} {tally.unanswered[name]:11}" for name in MOMENTS]
    restarts = sorted(tally.restarts_s)
    rows += [
        "",
        f"rounds       {tally.rounds:7}   in {took_s:.0f} s",
        f"journals     {tally.chapters:7}   each consumed to its last prompt",
        f"prompts      {tally.prompts:7}   consumed, each as often as it was given",
        f"batches      {tally.batches:7}",
        f"restart      {median(restarts):7.2f} s median, {restarts[-1]:.2f} s at most, of {len(restarts)}",
    ]
    return rows


def main() -> int:
    """Run the rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.durability", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    try:
        tally = asyncio.run(run(options.rounds, options.seed, _say))
    except AssertionError as error:
        _say(f"broken: {error}")
        return 1
    for row in _table(tally, time.monotonic() - began):
        _say(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
