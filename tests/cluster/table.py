"""`python -m tests.cluster.table FIGURES PAGE`: lay what a run measured into the table of a page, between its markers.

- `CLUSTER_FIGURES=FIGURES make test-ray` measures; a row whose figure was not measured is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["render"]

BEGIN: Final = "<!-- failures:begin -->"
END: Final = "<!-- failures:end -->"
_HEAD: Final = "| what fails | what happens | how long, s | lost |\n|---|---|---|---|"
_ROWS: Final = (
    ("node of an engine", "node of an engine lost", "its requests move, its engine starts on another node",
     "{taken_s} until a batch of what it held, {back_s} until the engine is back"),
    ("the same in a pause, before its aborts", "pause, a node dies: before", "the pause returns with its report",
     "{caller_s} of 2"),
    ("the same between them", "pause, a node dies: between", "likewise", "{caller_s} of 2"),
    ("the same while the report is made", "pause, a node dies: report", "likewise, its requests are named as abandoned",
     "{caller_s} of 2"),
    ("a raylet that hangs", "raylet hangs", "the cluster gives the node up, the engine starts on another", "{back_s}"),
    ("actor of an engine, kill -9", "actor of an engine killed", "engine and requests as for a node",
     "{gone_s} until its engine is gone, {back_s} until it is back"),
    ("actor of the service, kill -9", "actor of the service killed",
     "it starts again from its journal, its engines anew; calls meanwhile fail with `ActorUnavailableError`",
     "{engines_gone_s} until the old engines are gone, {answers_s} until it runs"),
    ("node of the service", "node of the service lost", "likewise, on a node that reaches the journal",
     "{engines_gone_s} until the old engines are gone, {answers_s} until it runs"),
    ("driver that started it, kill -9", "driver killed", "the service and its engines end", "{nothing_left_s}"),
    ("trainer that holds a lease", "trainer dies with a batch", "the lease ends, another trainer gets the groups",
     "{again_s} of a lease of {lease_s}"),
    ("object store full", "object store full", "others' objects spill to disk; batches and pauses go on",
     "{pause_s} for a pause, {take_s} for a batch meanwhile"),
)  # fmt: skip
_BY_LEAVE: Final = {"driver killed": "what no journal holds"}


def render(figures: dict[str, dict[str, Any]]) -> str:
    """Make the table; raises KeyError where a figure is missing."""
    rows = (
        f"| {what} | {happens} | {times.format(**figures[name])} | {_BY_LEAVE.get(name, 'nothing')} |"
        for what, name, happens, times in _ROWS
    )
    return "\n".join((_HEAD, *rows))


def main(figures: str, page: str) -> None:
    """Replace the part between the markers."""
    path = Path(page)
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = render(json.loads(Path(figures).read_text(encoding="utf-8")))
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
