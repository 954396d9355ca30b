"""`python -m tests.simulation.mutants.hunt NAME FIRST:LAST`: histories of the service with one mutant in it.

Invariant: a process of its own, for a mutant stays in it; it prints one line of JSON per seed, as each ends.
"""

from __future__ import annotations

import sys

import orjson

from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import infect

__all__ = ["main"]


def main(name: str, seeds: str) -> None:
    """Tell histories until the reader has had enough."""
    infect(MUTANTS[name])
    from tests.simulation.campaign import outcomes, seeds_of  # only now: it imports the service
    from tests.simulation.history import run_history

    run = run_history
    if MUTANTS[name].sharded:
        from tests.simulation.sharded.history import run_sharded as run

    for outcome in outcomes(seeds_of(seeds), adversarial=False, digest=False, jobs=1, run=run):
        line = orjson.dumps({"seed": outcome.seed, "broken": outcome.broken})
        print(line.decode(), flush=True)  # noqa: T201 - it is what was asked for


if __name__ == "__main__":
    main(*sys.argv[1:])
