"""The table of faults: one row a run, written as markdown where it is asked for.

- `CHAOS_TABLE` names the file whose part between the two markers is replaced; without it nothing is written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_svc.pause.report import PauseReport

__all__ = ["Row", "write_table"]

BEGIN: Final = "<!-- faults:begin -->"
END: Final = "<!-- faults:end -->"
_HEAD: Final = (
    "| fault | in flight | handler cancellation | pause, s | deadline, s | clean | abandoned | last rung |",
    "|---|---:|---|---:|---:|---|---:|---|",
)
_KB: Final = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    fault: str
    in_flight: int
    cancellation: str
    pause_s: float
    deadline_s: float
    clean: bool
    abandoned: int
    rung: str

    @classmethod
    def of(
        cls, fault: str, in_flight: int, cancellation: str, pause_s: float, deadline_s: float, report: PauseReport
    ) -> Row:
        """Make the row of a pause; `report` is always reached, so the rung before it is told."""
        rung = [rung.name for rung in report.rungs if rung.name != "report"][-1]
        return cls(fault, in_flight, cancellation, pause_s, deadline_s, report.clean, len(report.abandoned), rung)

    def __str__(self) -> str:
        return (
            f"| {self.fault} | {self.in_flight:,} | {self.cancellation} | {self.pause_s:.3f} | {self.deadline_s:g} "
            f"| {'yes' if self.clean else 'no'} | {self.abandoned:,} | {self.rung} |"
        )


def write_table(rows: list[Row]) -> None:
    """Put the rows between the markers of the file that `CHAOS_TABLE` names."""
    path = os.environ.get("CHAOS_TABLE")
    if not path or not rows:
        return
    page = Path(path).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join((*_HEAD, *map(str, rows)))
    text = f"{before}{BEGIN}\nMeasured on {_machine()}.\n\n{table}\n{END}{after}"
    Path(path).write_text(text, encoding="utf-8")


def _machine() -> str:
    """The machine in general words."""
    total_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return (
        f"a machine with {os.cpu_count()} cores and {round(total_kb / _KB / _KB)} GB of memory, "
        "the engines being processes on the same cores"
    )
