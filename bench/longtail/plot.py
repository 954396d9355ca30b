"""The picture in docs/async.md: three measures by waves, one column a staleness."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.longtail.cases import MEASURES, STALENESS, STRATEGIES, WAVES, Cell

__all__ = ["plot"]

_LOOKS: Final = (("#64748b", "o"), ("#b45309", "s"), ("#d97706", "^"), ("#0f766e", "D"), ("#4f46e5", "v"))
_LABELS: Final = {
    "use": "slots busy",
    "rate": "batches a second,\nover those of sync",
    "long": "long prompts, their share\ntrained over that given",
}
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longtail",
    "font.size": 9,
    "font.family": "sans-serif",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def plot(path: Path, points: list[dict[str, Any]]) -> None:
    """Draw the points of a report as one SVG; cases that are missing are left out.

    Args:
        path: where to.
        points: as the report has them.
    """
    # A rate is nothing without that of sync; the others are shares by themselves.
    values = {p["case"]: p["ratio"] if p["case"].startswith("rate-") else p["value"] for p in points}
    with mpl.rc_context(_SETTINGS):
        figure, grid = plt.subplots(len(MEASURES), len(STALENESS), sharex=True, sharey="row", figsize=(10, 7))
        for axes, measure in zip(grid, MEASURES, strict=True):
            axes[0].set_ylabel(_LABELS[measure])
            for axis, staleness in zip(axes, STALENESS, strict=True):
                _panel(axis, measure, staleness, values)
            axes[0].set_ylim(bottom=0)  # of the whole row, once everything is in it
        for axis, staleness in zip(grid[0], STALENESS, strict=True):
            axis.set_title(f"staleness {staleness}", fontsize=10)
        for axis in grid[-1]:
            axis.set_xlabel("waves")
        names = [strategy.name for strategy in STRATEGIES]
        figure.legend(grid[0][0].get_lines(), names, loc="upper center", ncols=len(names), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.96))
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    path.write_text(_small(drawn.getvalue()))


def _panel(axis: Any, measure: str, staleness: int, values: dict[str, float]) -> None:
    for strategy, (colour, marker) in zip(STRATEGIES, _LOOKS, strict=True):
        found = [values.get(Cell(strategy, waves, staleness).case(measure)) for waves in WAVES]
        at = [(place, value) for place, value in enumerate(found) if value is not None]
        places, heights = [place for place, _ in at], [value for _, value in at]
        axis.plot(places, heights, color=colour, marker=marker, markersize=4, linewidth=1.3)
    axis.set_xticks(range(len(WAVES)), [str(waves) for waves in WAVES])
    axis.grid(visible=True, axis="y", color="#e2e8f0", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)


def _small(svg: str) -> str:
    """Take out comments and digits that nobody sees: it is kept beside the text."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r" ?\n *", "\n", svg)
