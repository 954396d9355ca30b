"""How often each fault met each rung, over a run of histories; what never met is named.

Invariant: a cell that is 0 is either in `IMPOSSIBLE` or in `RARE`, with its reason, or a hole in the simulator.
"""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from tests.simulation.faults import FAULTS, IMPOSSIBLE, RARE, STANDS

__all__ = ["holes", "render"]

Met = Counter[tuple[str, str]]


def holes(met: Met) -> list[tuple[str, str]]:
    """Cells that are 0 and have no reason to be."""
    excused = IMPOSSIBLE.keys() | RARE.keys()
    return [(f, s) for f in FAULTS for s in STANDS if not met[f, s] and (f, s) not in excused]


def render(met: Met) -> Table:
    """The table, to be printed."""
    table = Table(title="fault x where the climb stood", box=None, header_style="bold")
    table.add_column("fault", no_wrap=True, min_width=max(map(len, FAULTS)))
    for stand in STANDS:
        table.add_column(stand, justify="right", no_wrap=True)
    for fault in FAULTS:
        cells = [str(met[fault, s]) if (fault, s) not in IMPOSSIBLE else "-" for s in STANDS]
        table.add_row(fault, *cells)
    return table
