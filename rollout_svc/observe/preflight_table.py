"""The record of a preflight for people: a table on a terminal, elsewhere a line for each worker, nothing cut off."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["shard_lines", "show_preflight"]

_COLUMNS: Final = {
    "engine": "dialect",
    "version": "engine_version",
    "model": "model",
    "vocabulary": "vocab_size",
    "context": "context",
    "at once": "max_running",
    "logprobs": "logprobs",
    "weights": "weight_label",
}
"""Heading, and key of a worker's record."""
_UNSAID: Final = "?"
_LAUNCHED: Final = "launched with the service"


def show_preflight(report: dict[str, Any]) -> None:
    """Print who answered what, the plan, and what would fail."""
    console = Console(emoji=False)  # names of others are told as they are
    if console.is_terminal:
        _show_table(console, report["workers"])
    else:
        for worker in report["workers"]:
            _print(console, _line(worker))
    if report["cluster"] is not None:
        for line in _of_cluster(report["cluster"]):
            _print(console, line)
    for line in shard_lines(report.get("shards", [])):
        _print(console, line)
    plan = {key: value for key, value in report["plan"].items() if key != "warnings"}
    _print(console, "plan: " + "  ".join(f"{key} {value}" for key, value in plan.items()))
    for warning in report["plan"]["warnings"]:
        _print(console, f"warning: {warning}", "yellow")
    for warning in report["warnings"]:
        _print(console, f"warning: {warning['path']}: {warning['message']}", "yellow")
    for problem in report["problems"]:
        _print(console, f"problem: {problem['path']}: {problem['message']}", "red")
    if report["ok"]:
        _print(console, "nothing would fail", "green")
    else:
        _print(console, f"{len(report['problems'])} would fail", "red")


def shard_lines(shards: list[dict[str, Any]]) -> list[str]:
    """A line for each shard: its share of a batch, and what its workers will be called."""
    return [
        f"shard {shard['id']}: groups={shard['groups']} limit={shard['limit']} journal={shard['journal']} "
        f"workers={','.join(f'{here}={there}' for there, here in shard['workers'].items())}"
        for shard in shards
    ]


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False, style=style)


def _show_table(console: Console, workers: list[dict[str, Any]]) -> None:
    table = Table("worker", "url", *_COLUMNS, "limit", box=None, pad_edge=False)
    for worker in workers:
        answered = worker["failure"] is None and not worker["launched"]
        told = [_said(worker, key) for key in _COLUMNS.values()] if answered else []
        silent = _LAUNCHED if worker["launched"] else "[red]no answer[/red]"
        words = [escape(word) for word in told] or [silent] + [""] * (len(_COLUMNS) - 1)
        table.add_row(worker["id"], escape(worker["url"] or ""), *words, str(worker["limit"]))
    console.print(table)
    for worker in workers:
        if worker["failure"] is None and not worker["launched"]:
            _print(console, f"{worker['id']} can {_can(worker)}")


def _line(worker: dict[str, Any]) -> str:
    if worker["launched"]:
        return f"{worker['id']} limit={worker['limit']} {_LAUNCHED}"
    head = f"{worker['id']} {worker['url']}"
    if worker["failure"] is not None:
        return f"{head} limit={worker['limit']} failure={worker['failure']!r}"
    told = " ".join(f"{key}={_said(worker, key)}" for key in (*_COLUMNS.values(), "tokenizer"))
    return f"{head} {told} limit={worker['limit']} can={_can(worker)}"


def _of_cluster(cluster: dict[str, Any]) -> list[str]:
    """A line for the cluster and what the engines want there, and one for each of its nodes."""
    wanted = f"engines want {_amounts(cluster['wanted'])}, strategy {cluster['strategy']}"
    if cluster["failure"] is not None:
        return [f"cluster {cluster['address']}: no answer; {wanted}"]
    head = f"cluster {cluster['address']}: {len(cluster['nodes'])} nodes, free {_amounts(cluster['free'])}; {wanted}"
    return [head, *(f"node {node['address']}: {_amounts(node['total'])}" for node in cluster["nodes"])]


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"


def _said(worker: dict[str, Any], key: str) -> str:
    return _UNSAID if worker[key] is None else str(worker[key])


def _can(worker: dict[str, Any]) -> str:
    return ",".join(worker["capabilities"]) or "nothing"
