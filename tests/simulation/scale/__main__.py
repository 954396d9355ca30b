"""`python -m tests.simulation.scale`: what the service costs by engines and by requests in flight, in virtual time.

Prints a line for each case, what the growth from case to case is, and what that comes to at 1,000 engines and a million
requests in flight; the last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import orjson

from tests.simulation.scale.growth import growth, told
from tests.simulation.scale.measure import Figures, measure
from tests.simulation.scale.pauses import KINDS, measure_pause

CASES: Final = (
    (10, 1_000),
    (10, 10_000),
    (100, 10_000),
    (300, 10_000),
    (1_000, 10_000),
    (10, 50_000),
    (1_000, 100_000),
)
PAUSED: Final = (2_000, 20_000)
_ENGINES: Final = 100  # of the pauses that are not simple


def _case(text: str) -> tuple[int, int]:
    engines, _, requests = text.partition("x")
    return int(engines), int(requests)


def _apart(work: Callable[..., Figures], *arguments: object) -> Figures:
    """Measure in a process of its own: what the case before has left of memory would hide what this one takes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, tell, and draw where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description=__doc__)
    parser.add_argument("--cases", nargs="+", type=_case, default=list(CASES), metavar="ENGINESxREQUESTS")
    parser.add_argument("--pauses", nargs="*", type=int, default=list(PAUSED), metavar="NUMBER")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--before", type=Path, metavar="FILE.json", help="points of another state, drawn beside these")
    options = parser.parse_args()
    points = []
    for engines, requests in options.cases:
        points.append({"engines": engines, "in_flight": requests, **_apart(measure, engines, requests)})
        _say(told(points[-1]))
    pauses = []
    for kind in KINDS:
        for number in options.pauses:
            pauses.append({"kind": kind, "number": number, **_apart(measure_pause, kind, _ENGINES, number)})
            _say(told(pauses[-1]))
    for line in growth(points):
        _say(line)
    if options.plot is not None:
        from tests.simulation.scale.plot import plot

        before = [] if options.before is None else orjson.loads(options.before.read_bytes())["points"]
        plot(options.plot, points, before)
    _say(orjson.dumps({"name": "scale", "points": points, "pauses": pauses}).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
