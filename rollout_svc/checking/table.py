"""The report of a check for people: a table on a terminal, elsewhere a few lines for each finding, nothing cut off."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["show_check"]

_PARTS: Final = ("done", "expected", "happened", "where")


def show_check(report: dict[str, Any]) -> None:
    """Print what was found, and whether anything was."""
    console = Console(emoji=False)  # names of others are told as they are
    for finding in report["findings"]:
        if console.is_terminal:
            _show(console, finding)
        else:
            _print(console, f"{finding['where'] or report['target']}: {finding['rule']}: {finding['happened']}")
            for part in _PARTS[:2]:
                _print(console, f"  {part}: {finding[part]}")
    for reason in report["skipped"]:
        _print(console, f"not tried: {reason}", "yellow")
    tries = f"{report['tries']} runs"
    if report["ok"]:
        _print(console, f"{report['target']}: nothing found in {tries}", "green")
    else:
        _print(console, f"{report['target']}: {len(report['findings'])} found in {tries}", "red")


def _show(console: Console, finding: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("[red]found[/red]", f"[red]{escape(finding['rule'])}[/red], {finding['times']} times")
    for part in _PARTS:
        table.add_row(part, escape(finding[part]))
    console.print(table)
    console.print()


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False, style=style)
