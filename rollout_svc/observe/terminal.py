"""The control API's records for people: tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["show_report", "show_status", "show_stuck"]

_STYLE = {"ACTIVE": "green", "STARTING": "yellow", "DRAINING": "yellow"}


def show_status(status: dict[str, Any]) -> None:
    """Print the record of `GET /v1/status`."""
    console = Console(emoji=False)  # names of others are told as they are
    lanes = "  ".join(
        f"{name} {'open' if lane['open'] else 'closed'}, {lane['in_flight']} in flight"
        for name, lane in status["lanes"].items()
    )
    console.print(
        f"[bold]{status['state']}[/bold]  ticket {status['ticket']}  weights {status['weight_version']}  {lanes}"
    )
    weights = status.get("weights", {})
    if phases := weights.get("phases_s"):
        took = "  ".join(f"{phase} {seconds:.3f} s" for phase, seconds in phases.items())
        moved = f"  {weights['buckets']} buckets, {weights['bytes'] / 2**20:.1f} MiB" if weights["buckets"] else ""
        console.print(f"update: {took}{moved}{_under_way(weights)}", soft_wrap=True)
    if failed := weights.get("error"):
        console.print(f"[red]the update failed[/red]: {escape(failed)}", soft_wrap=True)
    workers = Table("worker", "url", "state", "in flight", "limit", "weights", "why", box=None, pad_edge=False)
    for worker in status["workers"]:
        style = _STYLE.get(worker["state"], "red")
        state = f"[{style}]{worker['state']}[/{style}]"
        if worker.get("frozen"):
            state += " [cyan]frozen[/cyan]"
        if worker.get("asleep"):
            state += " [cyan]asleep[/cyan]"
        numbers = (str(worker["in_flight"]), str(worker["limit"]), str(worker["weight_version"]))
        workers.add_row(worker["id"], worker["url"], state, *numbers, worker["reason"])
    console.print(workers)
    if reason := status.get("producer", {}).get("waiting_for"):
        console.print(f"producer waits: {reason}")
    console.print(_ledger(status["ledger"]))


def _under_way(weights: dict[str, Any]) -> str:
    """How far an update is that has not ended."""
    if weights.get("state") != "updating":
        return ""
    of = f" of {weights['total_bytes'] / 2**20:.1f} MiB" if weights["total_bytes"] is not None else ""
    return f"{of}, {weights['phase'] or 'next'} now, {weights['seconds']:.1f} s so far"


def show_report(report: dict[str, Any]) -> None:
    """Print a PauseReport."""
    console = Console(emoji=False)  # names of others are told as they are
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
    for name, tags in report["offloaded"].items():
        console.print(f"offloaded: {name} {', '.join(tags) or 'nothing'}")
    for name, reason in report["not_offloaded"].items():
        console.print(f"not offloaded: {name}: {reason}")
    console.print(_ledger(report["ledger"]))


def show_stuck(stuck: dict[str, Any]) -> None:
    """Print the record of `GET /v1/stuck`: a table on a terminal, elsewhere a line for each, nothing cut off."""
    console = Console(emoji=False)  # names of others are told as they are
    counts = ", ".join(f"{number} {place}" for place, number in stuck["counts"].items()) or "nobody"
    summary = f"under way for over {stuck['older_than_s']:g} s: {counts}"
    if stuck["groups"]:
        summary += f"; {len(stuck['groups']) + stuck['groups_omitted']} groups in the buffer"
    if console.is_terminal:
        _show_stuck_table(console, summary, stuck)
        return
    lines = [summary]
    for sample in stuck["samples"]:
        told = " ".join(f"{key}={sample[key]}" for key in ("since_s", "age_s", "attempt", "tokens"))
        awaits = " > ".join(sample["awaits"] or ["?"])
        lines.append(f"{sample['sample_id']} {sample['where']}{_beside(sample)} {told} awaits={awaits}")
    lines += [
        f"{group['group_id']} buffered({group['reason']}) since_s={group['since_s']}" for group in stuck["groups"]
    ]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _show_stuck_table(console: Console, summary: str, stuck: dict[str, Any]) -> None:
    console.print(summary, highlight=False)
    columns = ("sample", "where", "since", "age", "attempt", "tokens", "awaits")
    samples = Table(*columns, box=None, pad_edge=False)
    for sample in stuck["samples"]:
        innermost = escape((sample["awaits"] or ["?"])[-1])
        times = (f"{sample['since_s']:.1f} s", f"{sample['age_s']:.1f} s")
        where = escape(sample["where"] + _beside(sample))
        samples.add_row(sample["sample_id"], where, *times, str(sample["attempt"]), str(sample["tokens"]), innermost)
    for group in stuck["groups"]:
        times = (f"{group['since_s']:.1f} s", f"{group['since_s']:.1f} s")
        samples.add_row(group["group_id"], f"buffered ({group['reason']})", *times, "-", "-", "-")
    console.print(samples)


def _beside(sample: dict[str, Any]) -> str:
    """Where exactly: the worker, the judger, the gate or the tool."""
    beside = sample["worker"] or sample["judger"] or sample["at"]
    return "" if beside is None else f"({beside})"


def _ledger(ledger: dict[str, Any]) -> str:
    """Two lines: the accounts that are not empty."""
    lines = []
    for unit in ("groups", "samples"):
        accounts = ", ".join(f"{number} {name}" for name, number in ledger[unit].items() if number)
        lines.append(f"{unit + ':':9}{accounts or 'none yet'}")
    return "\n".join(lines)
