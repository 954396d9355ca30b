"""The control API's records for people: tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["show_report", "show_status"]

_STYLE = {"ACTIVE": "green", "STARTING": "yellow", "DRAINING": "yellow"}


def show_status(status: dict[str, Any]) -> None:
    """Print the record of `GET /v1/status`."""
    console = Console()
    lanes = "  ".join(
        f"{name} {'open' if lane['open'] else 'closed'}, {lane['in_flight']} in flight"
        for name, lane in status["lanes"].items()
    )
    console.print(
        f"[bold]{status['state']}[/bold]  ticket {status['ticket']}  weights {status['weight_version']}  {lanes}"
    )
    workers = Table("worker", "url", "state", "in flight", "limit", "weights", "why", box=None, pad_edge=False)
    for worker in status["workers"]:
        style = _STYLE.get(worker["state"], "red")
        state = f"[{style}]{worker['state']}[/{style}]"
        if worker.get("frozen"):
            state += " [cyan]frozen[/cyan]"
        numbers = (str(worker["in_flight"]), str(worker["limit"]), str(worker["weight_version"]))
        workers.add_row(worker["id"], worker["url"], state, *numbers, worker["reason"])
    console.print(workers)
    if reason := status.get("producer", {}).get("waiting_for"):
        console.print(f"producer waits: {reason}")
    console.print(_ledger(status["ledger"]))


def show_report(report: dict[str, Any]) -> None:
    """Print a PauseReport."""
    console = Console()
    word = "[green]clean[/green]" if report["clean"] else f"[red]{len(report['abandoned'])} abandoned[/red]"
    console.print(f"ticket {report['ticket']}  {word}  {report['elapsed_s']:.3f} s  {len(report['parked'])} parked")
    rungs = "  ".join(f"{rung['name']} {rung['at_s']:.3f} s ({rung['pending']})" for rung in report["rungs"])
    console.print(f"rungs (pending): {rungs}")
    columns = ("in_flight", "answered", "late", "cancelled", "abandoned", "residual")
    workers = Table("worker", *columns, box=None, pad_edge=False)
    for name, tally in report["workers"].items():
        workers.add_row(name, *(str(tally[column]) for column in columns))
    console.print(workers)
    for lost in report["abandoned"]:
        console.print(f"abandoned: {lost['sample_id']} at {lost['worker']}, {lost['age_s']:.1f} s old")
    console.print(_ledger(report["ledger"]))


def _ledger(ledger: dict[str, Any]) -> str:
    """Two lines: the accounts that are not empty."""
    lines = []
    for unit in ("groups", "samples"):
        accounts = ", ".join(f"{number} {name}" for name, number in ledger[unit].items() if number)
        lines.append(f"{unit + ':':9}{accounts or 'none yet'}")
    return "\n".join(lines)
