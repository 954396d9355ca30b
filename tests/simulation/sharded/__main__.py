"""`python -m tests.simulation.sharded 0:500`: run seeds, print what they met, and the first history that broke."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.simulation.campaign import Summary, outcomes, seeds_of
from tests.simulation.sharded.faults import FAULTS, STANDS
from tests.simulation.sharded.history import run_sharded

_LINES = 400  # of a broken history, before its end
_LOG_COLUMNS = 120  # of a log, which has no width of its own


def main(
    seeds: Annotated[str, typer.Argument(help="FIRST:LAST, half open, or one seed")],
    adversarial: Annotated[bool, typer.Option(help="shuffle the wake-ups of a turn as well")] = False,
    jobs: Annotated[int, typer.Option(help="processes")] = 1,
    digest: Annotated[bool, typer.Option(help="print each history's digest, and nothing else")] = False,
    tell: Annotated[bool, typer.Option(help="print the whole history, also of a seed that breaks nothing")] = False,
) -> None:
    """Run histories of a sharded service."""
    wanted = seeds_of(seeds)
    if digest:
        for outcome in outcomes(wanted, adversarial=adversarial, digest=True, jobs=1, run=run_sharded):
            print(outcome.seed, outcome.digest, flush=True)  # noqa: T201 - it is what was asked for
        return
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
    summary, began = Summary(), time.perf_counter()
    for outcome in outcomes(wanted, adversarial=adversarial, digest=False, jobs=jobs, run=run_sharded):
        summary.add(outcome)
        if outcome.broken is not None:
            console.print(f"seed {outcome.seed}: {outcome.broken}", markup=False)
    seconds = time.perf_counter() - began
    if len(wanted) == 1 or summary.broken:
        seed = min(summary.broken, default=wanted[0])
        lines = run_sharded(seed, adversarial=adversarial, keep=True).lines
        for line in lines if tell else lines[-_LINES:]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {seed}: {summary.broken.get(seed, 'every promise held')}", markup=False)
    console.print(_table(summary))
    histories = summary.histories
    console.print(
        f"{histories} histories, {histories / seconds:.1f} a second; each {summary.admitted / histories:.0f} groups, "
        f"{summary.pauses / histories:.0f} pauses, {summary.turns / histories:.0f} turns of the loop"
    )
    if summary.broken:
        console.print(f"{len(summary.broken)} broke a promise: {', '.join(map(str, summary.broken))}")
        raise typer.Exit(1)


def _table(summary: Summary) -> Table:
    table = Table(title="fault x where the coordinator stood", box=None, header_style="bold")
    table.add_column("fault", no_wrap=True)
    for stand in STANDS:
        table.add_column(stand, justify="right", no_wrap=True)
    for fault in FAULTS:
        table.add_row(fault, *(str(summary.met[fault, stand]) for stand in STANDS))
    return table


if __name__ == "__main__":
    typer.run(main)
