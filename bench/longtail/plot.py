"""The picture in docs/async.md: three measures by waves, one column a staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.longtail.cases import STALENESS, STRATEGIES, WAVES, Cell

__all__ = ["plot"]

_COLOURS: Final = ("#64748b", "#b45309", "#d97706", "#0f766e", "#4f46e5")
_MARKERS: Final = "os^Dv"
_ROWS: Final = (
    ("use", "slots busy"),
    ("rate", "batches a second,\nover sync"),
    ("long", "share of long prompts,\ntrained over given"),
)


def plot(path: Path, points: list[dict[str, Any]]) -> None:
    """Draw the points of a report as one SVG; cases that are missing are left out.

    Args:
        path: where to.
        points: as the report has them.
    """
    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "longtail", "font.size": 9, "font.family": "sans-serif"}
    )
    values = {point["case"]: point["value"] if _is_share(point["case"]) else point["ratio"] for point in points}
    figure, axes = plt.subplots(len(_ROWS), len(STALENESS), sharex=True, sharey="row", figsize=(10, 7))
    for row, (measure, label) in zip(axes, _ROWS, strict=True):
        row[0].set_ylabel(label)
        for axis, staleness in zip(row, STALENESS, strict=True):
            for strategy, colour, marker in zip(STRATEGIES, _COLOURS, _MARKERS, strict=True):
                cells = [Cell(strategy, waves, staleness) for waves in WAVES]
                found = [(c.waves, values[c.case(measure)]) for c in cells if c.case(measure) in values]
                axis.plot(
                    *zip(*found, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.3
                ) if found else None
            axis.set_xscale("log", base=2)
            axis.set_xticks(WAVES, [str(waves) for waves in WAVES], minor=False)
            axis.grid(visible=True, color="#e2e8f0", linewidth=0.7)
            axis.spines[["top", "right"]].set_visible(False)
    for axis, staleness in zip(axes[0], STALENESS, strict=True):
        axis.set_title(f"staleness {staleness}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("waves: samples of a batch over slots")
    handles = axes[0][0].get_lines()
    names = [strategy.name for strategy in STRATEGIES]
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _is_share(case: str) -> bool:
    """Whether the value itself is drawn, and not how it compares: a rate is nothing without that of sync."""
    return not case.startswith("rate-")
