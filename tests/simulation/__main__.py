"""`python -m tests.simulation 0:3000`: run seeds, print what they met, and the history of the first that broke."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.simulation.campaign import Summary, digests_elsewhere, outcomes, seeds_of
from tests.simulation.history import run_history
from tests.simulation.table import holes, render

_LINES = 400  # of a broken history, before its end
_LOG_COLUMNS = 120  # of a log, which has no width of its own
_OTHER_HASH_SEED = 4  # of the process that tells the same histories again
_FULL_TABLE = 3000  # histories after which every cell has to have been met


def main(
    seeds: Annotated[str, typer.Argument(help="FIRST:LAST, half open, or one seed")],
    adversarial: Annotated[bool, typer.Option(help="shuffle the wake-ups of a turn as well")] = False,
    jobs: Annotated[int, typer.Option(help="processes")] = 1,
    digest: Annotated[bool, typer.Option(help="print each history's digest, and nothing else")] = False,
    compare: Annotated[bool, typer.Option(help="run the seeds in two processes with different hash seeds")] = False,
    tell: Annotated[bool, typer.Option(help="print the whole history, also of a seed that breaks nothing")] = False,
) -> None:
    """Run histories."""
    if digest:
        for outcome in outcomes(seeds_of(seeds), adversarial=adversarial, digest=True, jobs=1):
            print(outcome.seed, outcome.digest, flush=True)  # noqa: T201 - it is what was asked for
        return
    there = digests_elsewhere(seeds, _OTHER_HASH_SEED, adversarial=adversarial) if compare else None
    try:
        here = _campaign(seeds, adversarial=adversarial, jobs=1 if compare else jobs, tell=tell, compare=compare)
        if there is not None:
            _compare(here, there.communicate()[0].splitlines())
    finally:
        if there is not None:
            there.kill()
            there.wait()


def _compare(here: list[str], there: list[str]) -> None:
    """Exit 1 unless another process, with another hash seed, told the same histories to the last digit."""
    different = [line.split()[0] for line, other in zip(here, there, strict=False) if line != other]
    if different or len(here) != len(there):
        Console().print(f"seeds that differ in another process: {', '.join(different) or 'it stopped early'}")
        raise typer.Exit(1)
    Console().print(f"{len(here)} histories are the same in another process, to the last digit")


def _campaign(seeds: str, *, adversarial: bool, jobs: int, tell: bool, compare: bool) -> list[str]:
    wanted = seeds_of(seeds)
    # A log is as wide as the table; a terminal is as wide as it is.
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
    summary, digests = Summary(), []
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("histories", total=len(wanted))
        for outcome in outcomes(wanted, adversarial=adversarial, digest=compare, jobs=jobs):
            summary.add(outcome)
            digests.append(f"{outcome.seed} {outcome.digest}")
            progress.advance(task)
            if outcome.broken is not None:
                console.print(f"seed {outcome.seed}: {outcome.broken}", markup=False)
    seconds = time.perf_counter() - began
    if len(wanted) == 1 or summary.broken:
        _print_history(console, min(summary.broken, default=wanted[0]), adversarial=adversarial, whole=tell)
    console.print(render(summary.met))
    _conclude(console, summary, seconds, jobs, whole_table=not adversarial and summary.histories >= _FULL_TABLE)
    return digests


def _conclude(console: Console, summary: Summary, seconds: float, jobs: int, *, whole_table: bool) -> None:
    """Say what it came to, and exit 1 where that is not good enough."""
    histories = summary.histories
    rate = histories / seconds
    console.print(
        f"{histories} histories, {rate:.1f} a second ({rate / jobs:.1f} a core); each "
        f"{summary.admitted / histories:.0f} groups, {summary.pauses / histories:.0f} pauses, "
        f"{summary.turns / histories:.0f} turns of the loop"
    )
    missing = holes(summary.met)
    if missing and whole_table:
        console.print(f"never met: {missing}")
    if summary.broken:
        told = " ".join(f"{seed}:{seed + 1}" for seed in list(summary.broken)[:20])
        console.print(f"{len(summary.broken)} broke a promise; replay with make simulate SEEDS=  {told}")
    if summary.broken or (missing and whole_table):
        raise typer.Exit(1)


def _print_history(console: Console, seed: int, *, adversarial: bool, whole: bool) -> None:
    outcome = run_history(seed, adversarial=adversarial, keep=True)
    for line in outcome.lines if whole else outcome.lines[-_LINES:]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"seed {seed}: {outcome.broken or 'every promise held'}", markup=False)


if __name__ == "__main__":
    typer.run(main)
