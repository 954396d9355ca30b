"""Runs the cases on one cluster, one after the other, and prints the report."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from bench.cluster import spending
from bench.cluster.byref import byref
from bench.cluster.nodes import started
from bench.cluster.stopping import BOUND, pause4
from bench.process import raise_open_files
from bench.report import Missing, Point, print_report, progress
from rollout_svc.config import ProducerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cluster.nodes import Nodes

ROUNDS = 5
SHARDED = {"shards4": spending.SHARDS_BOUND, "pause4": BOUND}
"""Bounds of the cases that want shards."""
CASES: dict[str, Callable[[Nodes, int], Point | Missing]] = {
    "actor": spending.actor,
    "shards4": spending.shards4,
    "pause4": pause4,
    "byref": byref,
}


def can_be_sharded() -> bool:
    """Whether the settings know shards."""
    return "shards" in ProducerConfig.model_fields


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description="A service on a Ray cluster.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, help="these cases")
    parser.add_argument("--shards", type=int, default=1, choices=(1, 2, 4), help="of the service in case byref")
    options = parser.parse_args()
    raise_open_files()
    points: list[Point | Missing] = []
    cases = CASES | {"byref": partial(byref, shards=options.shards)}
    with started(spending.ENGINES + 1) as nodes:
        for name, case in cases.items():
            if options.only is not None and name not in options.only:
                continue
            progress(f"{name}: begins")
            if name in SHARDED and not can_be_sharded():
                points.append(Missing(name, "a service has no shards yet: there is no producer.shards", SHARDED[name]))
            else:
                points.append(case(nodes, options.rounds))
    return 0 if print_report("cluster", points) else 1


if __name__ == "__main__":
    sys.exit(main())
