"""`python -m tests.simulation.mutants [NAME...]`: how soon is each mutant found, and does any survive?

`--seeds` is cut into three ranges: each mutant is looked for in each of them from its first seed on, and the table has
the median. `--quick` tries the recorded seed of each and 100 more, or fewer where it was killed 25 times by then: one
of them has to kill it. What is found by one history in hundreds has only its recorded seed: one that does not kill any
more is named, and `--record` finds another.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.simulation.mutants.campaign import Hunt, Verdict, median_found_after, run
from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.recorded import read_seeds, write_seeds

_RANGES: Final = 3
_MORE: Final = 100  # seeds beside the recorded one, in a quick run
_ENOUGH: Final = 25  # kills after which a quick run leaves a mutant: by then it is said how often it is found


def main(
    names: Annotated[list[str] | None, typer.Argument(help="which mutants; all of them")] = None,
    seeds: Annotated[str, typer.Option(help="FIRST:LAST, half open")] = "0:3000",
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
    quick: Annotated[bool, typer.Option(help="the recorded seeds, and some more beside")] = False,
    more: Annotated[int, typer.Option(help="seeds beside the recorded one, in a quick run")] = _MORE,
    record: Annotated[bool, typer.Option(help="write down the first seed that kills each")] = False,
) -> None:
    """Put each mutant into the service and look for it."""
    if unknown := set(names or ()) - set(MUTANTS):
        raise typer.BadParameter(f"no mutants {', '.join(sorted(unknown))}; there are {', '.join(MUTANTS)}")
    mutants = [MUTANTS[name] for name in names or MUTANTS]
    console, known = Console(), read_seeds()
    hunts = _quick_hunts(mutants, known, more) if quick else _hunts(mutants, seeds)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("hunts", total=len(hunts))
        verdicts = run(hunts, jobs, lambda _: progress.advance(task))
    by_name = {mutant.name: _in_order(verdicts, mutant) for mutant in mutants}
    survivors = [name for name, found in by_name.items() if not any(verdict.killers for verdict in found)]
    console.print(_table(by_name, quick=quick))
    _tell_the_rest(console, verdicts)
    if record and not quick:
        kills = {name: [v.killers[0] for v in found if v.killers] for name, found in by_name.items()}
        write_seeds(known | {name: min(found) for name, found in kills.items() if found})
    console.print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were found")
    if survivors or any(verdict.error for verdict in verdicts):
        console.print(f"not found: {', '.join(survivors) or 'none'}")
        raise typer.Exit(1)


def _tell_the_rest(console: Console, verdicts: list[Verdict]) -> None:
    """Say what else came up: findings that are no kills, and processes that ended by themselves."""
    for verdict in verdicts:
        name = verdict.hunt.mutant.name
        for kind, seed in verdict.odd.items():
            console.print(f"{name}: {kind} at seed {seed} is not what it is known for", markup=False)
        if verdict.error:
            console.print(f"{name} ended early:\n{verdict.error}", markup=False)


def _hunts(mutants: list[Mutant], seeds: str) -> list[Hunt]:
    """Three a mutant, the first ranges of all mutants first: a survivor shows early."""
    first, _, last = seeds.partition(":")
    whole = range(int(first), int(last) if last else int(first) + 1)
    step = max(1, -(-len(whole) // _RANGES))
    ranges = [whole[start : start + step] for start in range(0, len(whole), step)]
    return [Hunt(mutant, part) for part in ranges for mutant in mutants]


def _quick_hunts(mutants: list[Mutant], known: dict[str, int], more: int) -> list[Hunt]:
    """One a mutant: the recorded seed is the first, so that the process is started once."""
    return [Hunt(m, range(known[m.name], known[m.name] + 1 + more), _ENOUGH) for m in mutants]


def _in_order(verdicts: list[Verdict], mutant: Mutant) -> list[Verdict]:
    return sorted((v for v in verdicts if v.hunt.mutant is mutant), key=lambda verdict: verdict.hunt.seeds.start)


def _table(by_name: dict[str, list[Verdict]], *, quick: bool) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("mutant", min_width=max(map(len, by_name)))
    table.add_column("caught by")
    for title in ("recorded" if quick else "median seeds", "kills", "of", "seconds"):
        table.add_column(title, justify="right")
    for name, found in by_name.items():
        kinds = sorted({kind for verdict in found for kind in verdict.by})
        if quick:
            seed = found[0].hunt.seeds.start
            cell = str(seed) if all(verdict.found_after == 1 for verdict in found) else f"{seed} does not"
        else:
            cell = f"{median_found_after(found):g}" if any(verdict.killers for verdict in found) else "-"
        kills, tried = sum(len(v.killers) for v in found), sum(v.tried for v in found)
        table.add_row(
            name, " ".join(kinds) or "-", cell, str(kills), str(tried), f"{sum(v.seconds for v in found):.1f}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)
