"""`python -m bench.longtail`: slot use, rate and fairness to long prompts of each strategy, in virtual time.

The service is the real one, in process; engines, trainer and clock are not. Every figure is deterministic.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import orjson

from bench.longtail.cases import BATCH, CASES, CELLS, STRATEGIES, Cell
from bench.longtail.ideal import ideal, littles_law
from bench.longtail.outcome import Outcome
from bench.longtail.run import timed, train_s
from bench.longtail.tables import print_tables
from bench.longtail.trace import SEED, Trace, make_trace, recorded
from bench.report import Point, print_report

USE_BOUND: Final = 0.95
"""Of what the trace allows, for the last strategy."""
LONG_BOUND: Final = 0.99
"""One less the distance of the share from 1.0, where the tail batch is on."""


def say(text: str) -> None:
    """Progress: beside the figures, not among them."""
    print(text, file=sys.stderr, flush=True)


def best(cell: Cell, trace: Trace, *, expiring: bool = True) -> Outcome:
    """What the trace allows a cell of the last strategy."""
    seconds = train_s(trace, cell)
    return ideal(trace, cell.slots, BATCH, cell.staleness, seconds, expiring=expiring)


def measure(cells: list[Cell], trace: Trace, jobs: int) -> dict[Cell, Outcome]:
    """Play cells, some at a time; each is the same in whatever process it is played."""
    found = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for cell, (result, seconds) in zip(cells, pool.map(timed, cells, repeat(trace)), strict=True):
            found[cell] = result
            say(
                f"{len(found)}/{len(cells)} {cell.case('')[1:]}: use {result.use:.3f}, long {result.long:.3f}, kept "
                f"{result.kept:.3f}, {result.batches} batches; {seconds:.1f} s"
            )
    return found


def points(cells: list[Cell], found: dict[Cell, Outcome], allowed: dict[Cell, Outcome]) -> dict[str, Point]:
    """The figures as the report has them, by case."""
    made: list[Point] = []
    for cell in cells:
        mine, sync = found[cell], Cell(STRATEGIES[0], cell.waves, cell.staleness)
        if cell in allowed:
            made.append(Point(cell.case("use"), mine.use, allowed[cell].use, USE_BOUND, "higher"))
        else:
            made.append(Point(cell.case("use"), mine.use, 1.0, None, "higher"))
        if sync in found:
            made.append(Point(cell.case("rate"), mine.rate, found[sync].rate, None, "higher"))
        if cell.strategy.tail:
            made.append(Point(cell.case("long"), 1 - abs(mine.long - 1), 1.0, LONG_BOUND, "higher"))
        else:
            made.append(Point(cell.case("long"), mine.long, 1.0, None, "higher"))
    return {point.case: point for point in made}


def chosen(only: list[str] | None) -> list[Cell]:
    """The cells that the cases need: a rate is over that of `sync` in the same cell."""
    if only is None:
        return list(CELLS)
    asked = [cell for cell in CELLS if any(cell.case(measure) in only for measure in ("use", "rate", "long"))]
    compared = {(cell.waves, cell.staleness) for cell in asked if cell.case("rate") in only}
    return [
        cell
        for cell in CELLS
        if cell in asked or (cell.strategy == STRATEGIES[0] and (cell.waves, cell.staleness) in compared)
    ]


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.longtail", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, help="these cases")
    parser.add_argument("--seed", type=int, default=SEED, help="another trace than the recorded one")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the figures as well")
    parser.add_argument("--read", type=Path, metavar="JSON", help="draw what was printed before; run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="cells played at once; the figures are the same")
    options = parser.parse_args()
    if options.read is not None:
        draw(options.plot, options.read.read_bytes().splitlines()[-1])
        return 0
    trace = recorded() if options.seed == SEED else make_trace(options.seed)
    say(
        f"trace {options.seed}: {len(trace.tokens)} prompts, a sample has {trace.mean_tokens:.1f} tokens, the longest "
        f"of a group {trace.mean_longest_tokens:.1f}"
    )
    cells = chosen(options.only)
    found = measure(cells, trace, options.jobs)
    allowed = {cell: best(cell, trace) for cell in cells if cell.strategy == STRATEGIES[-1]}
    endless = {cell: best(cell, trace, expiring=False) for cell in allowed}
    print_tables(found, allowed, endless, lambda cell: littles_law(trace, cell.slots, BATCH, cell.staleness))
    cases = points(cells, found, allowed)
    report = [cases[case] for case in CASES if case in cases and (options.only is None or case in options.only)]
    if options.plot is not None:
        draw(options.plot, orjson.dumps({"points": [point.as_dict() for point in report]}))
    return 0 if print_report("longtail", report) else 1


def draw(path: Path | None, report: bytes) -> None:
    """Draw a report; matplotlib is imported only here."""
    from bench.longtail.plot import plot  # noqa: PLC0415 - half a second that most runs have no use for

    plot(path or Path("longtail.svg"), orjson.loads(report)["points"])


if __name__ == "__main__":
    sys.exit(main())
