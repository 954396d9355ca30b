"""The record of `GET /v1/memory` as text that can be pasted into a bug report: no colours, no lines that are cut."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rollout_svc.observe.memory.advice import advice_on

__all__ = ["render_memory", "show_memory"]

_UNITS: Final = ("B", "KB", "MB", "GB", "TB")
_UNIT: Final = 1000
_HEAD: Final = ("process", "account", "now", "at first", "a step")


def show_memory(record: Mapping[str, Any]) -> None:
    """Print the record."""
    sys.stdout.write("\n".join(render_memory(record)) + "\n")


def render_memory(record: Mapping[str, Any]) -> Iterator[str]:
    """Give the lines."""
    yield record["verdict"]
    for growth in record["growing"]:
        yield f"  {growth['account']}: {advice_on(growth['account'])}"
    seen = f"{record['steps']} steps seen, the last one {record['step']}" if record["steps"] else "no step seen yet"
    yield f"{seen}; slopes over {record['window_steps']} steps"
    yield ""
    yield from _table(_HEAD, list(_rows(record["processes"])))
    yield ""
    yield from _handles(record)
    yield from _system(record["system"])
    if record["trouble"]:
        yield f"could not be read: {record['trouble']}"


def _rows(processes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for process in processes:
        name = process["name"] if process["pid"] is None else f"{process['name']} ({process['pid']})"
        for account, row in process["accounts"].items():
            slope = row["bytes_per_step"]
            told = "-" if slope is None else f"{'-' if slope < 0 else '+'}{_bytes(abs(slope))}"
            yield name, account, _bytes(row["bytes"]), _bytes(row["first_bytes"]), told
            name = ""


def _handles(record: Mapping[str, Any]) -> Iterator[str]:
    live = [f"{kind} {one['handles']} ({_bytes(one['bytes'])})" for kind, one in record["handles"].items()]
    yield f"live handles: {', '.join(live) or 'none'}"
    if record["lost"]:
        yield "forgotten by their owners: " + ", ".join(f"{kind} {number}" for kind, number in record["lost"].items())
    if record["holders"] is None:
        yield "holders: set memory.debug to have each handle listed with its holder"
    else:
        held = Counter((one["kind"], one["holder"]) for one in record["holders"])
        yield from (f"  {kind}: {number} held by {holder}" for (kind, holder), number in held.most_common())
    if record["holders_omitted"]:
        yield f"  and {record['holders_omitted']} more"


def _system(system: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(
        f"{key} {system[key] or 'not installed'}" for key in ("rollout_svc", "python", "torch", "ray", "numpy")
    )
    settings = ", ".join(f"{name}={value}" for name, value in system["settings"].items()) or "no settings of malloc"
    yield f"{system['libc']}, {system['allocator']}, {settings}"
    limit = system["memory_limit_bytes"]
    told = "no limit" if limit is None else f"limited to {_bytes(limit)}"
    yield f"{system['cpus']} cpus, {_bytes(system['memory_bytes'] or 0)} of memory, {told}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they have to be, the first two to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place <= 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _bytes(size: float) -> str:
    """Bytes with a unit, at most four digits."""
    value = float(size)
    for unit in _UNITS:
        if value < _UNIT or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _UNIT
    raise AssertionError  # the last unit takes everything
