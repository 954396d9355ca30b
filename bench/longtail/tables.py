"""The figures for people: one table a measure, strategies down, cells across.

Invariant: pure: numbers in, lines out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from bench.longtail.cases import CELLS, STALENESS, STRATEGIES, WAVES, Cell, Strategy

if TYPE_CHECKING:
    from bench.longtail.outcome import Outcome

__all__ = ["print_tables", "table"]

Read = Callable[[Cell], float | None]
_NAME: Final = max(len(strategy.name) for strategy in STRATEGIES) + 1
_COLUMN: Final = 6


def table(title: str, rows: Mapping[str, Callable[[int, int], float | None]]) -> list[str]:
    """Write a table: a row a name, a column a pair of waves and staleness; what was not measured is left empty."""
    pairs = [(waves, staleness) for waves in WAVES for staleness in STALENESS]
    head = "".join(f"w{waves}-s{staleness}".rjust(_COLUMN) for waves, staleness in pairs)
    lines = ["", title, " " * _NAME + head]
    for name, read in rows.items():
        values = [read(*pair) for pair in pairs]
        if any(value is not None for value in values):
            cells = ("" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}" for value in values)
            lines.append(name.ljust(_NAME) + "".join(cell.rjust(_COLUMN) for cell in cells))
    return lines


def print_tables(
    found: Mapping[Cell, Outcome],
    allowed: Mapping[Cell, Outcome],
    endless: Mapping[Cell, Outcome],
    law: Callable[[Cell], float],
) -> None:
    """Print every table: the three measures, what of the work was trained, and what the trace allows.

    Args:
        found: what was measured.
        allowed: the ideal of the last strategy.
        endless: the same where nothing expires, and the bound is the window's alone.
        law: slot use by Little's law.
    """
    at = {(cell.strategy, cell.waves, cell.staleness): cell for cell in CELLS}
    last = STRATEGIES[-1]

    def rows(read: Read) -> dict[str, Callable[[int, int], float | None]]:
        def row(strategy: Strategy) -> Callable[[int, int], float | None]:
            return lambda waves, staleness: read(at[strategy, waves, staleness])

        return {strategy.name: row(strategy) for strategy in STRATEGIES}

    def outcome(figure: Callable[[Outcome], float]) -> Read:
        return lambda cell: figure(found[cell]) if cell in found else None

    def rate(cell: Cell) -> float | None:
        sync = at[STRATEGIES[0], cell.waves, cell.staleness]
        return found[cell].rate / found[sync].rate if cell in found and sync in found else None

    def floor(read: Callable[[Cell], float | None]) -> Callable[[int, int], float | None]:
        return lambda waves, staleness: read(at[last, waves, staleness])

    use = rows(outcome(lambda found: found.use))
    use[" allowed"] = floor(lambda cell: allowed[cell].use if cell in allowed else None)
    use[" nothing expires"] = floor(lambda cell: endless[cell].use if cell in endless else None)
    use[" Little's law"] = floor(lambda cell: law(cell) if cell in allowed else None)
    long = rows(outcome(lambda found: found.long))
    long[" allowed"] = floor(lambda cell: allowed[cell].long if cell in allowed else None)
    long[" nothing expires"] = floor(lambda cell: endless[cell].long if cell in endless else None)
    for title, body in (
        ("use: busy slot-seconds over all slot-seconds", use),
        ("rate: batches a second over those of sync", rows(rate)),
        ("long: share of the longest tenth among prompts trained, over their share in the source", long),
        ("(no case) kept: tokens that were trained, over tokens that were made", rows(outcome(lambda f: f.kept))),
    ):
        print("\n".join(table(title, body)))
