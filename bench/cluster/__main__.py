"""Runs the cases on one cluster, one after the other, and prints the report."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from bench.cluster import spending
from bench.cluster.byref import byref
from bench.cluster.nodes import started
from bench.process import raise_open_files
from bench.report import Missing, Point, print_report, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cluster.nodes import Nodes

ROUNDS = 5
CASES: dict[str, Callable[[Nodes, int], Point | Missing]] = {"actor": spending.actor, "byref": byref}


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description="A service on a Ray cluster.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, help="these cases")
    options = parser.parse_args()
    raise_open_files()
    points: list[Point | Missing] = []
    with started(spending.ENGINES) as nodes:
        for name, case in CASES.items():
            if options.only is None or name in options.only:
                progress(f"{name}: begins")
                points.append(case(nodes, options.rounds))
    return 0 if print_report("cluster", points) else 1


if __name__ == "__main__":
    sys.exit(main())
