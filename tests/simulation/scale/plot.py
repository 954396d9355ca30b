"""The picture in docs/scale.md: what a request and a pause cost by the size of the fleet and by what is in flight."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt

__all__ = ["plot"]

Points = Sequence[Mapping[str, Any]]
_PANELS: Final = (
    ("dispatch_us", "engines", "dispatch of a request, µs"),
    ("start_us", "engines", "start of an engine, µs"),
    ("pause_us", "in_flight", "pause, µs a request"),
    ("dispatch_turn_ms", "in_flight", "longest turn while all are sent, ms"),
)
_WIDE: Final = 5
"""Costs that differ by less are drawn from zero."""
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scale",
    "font.size": 9,
    "font.family": "sans-serif",
}


def plot(path: Path, points: Points, before: Points = ()) -> None:
    """Draw four costs as one SVG.

    Args:
        path: where to.
        points: as the report has them.
        before: those of another state, drawn thin.
    """
    with mpl.rc_context(_SETTINGS):
        figure, grid = plt.subplots(1, len(_PANELS), figsize=(11, 3))
        for axis, (cost, by, label) in zip(grid, _PANELS, strict=True):
            for drawn, colour, name in ((before, "#b45309", "before"), (points, "#0f766e", "now")):
                _line(axis, drawn, cost, by, colour, name)
            axis.set_title(label, fontsize=9)
            axis.set_xlabel("engines" if by == "engines" else "requests in flight")
            axis.set_xscale("log")
            low, high = axis.get_ylim()
            if high > _WIDE * low:
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.grid(visible=True, color="#e2e8f0", linewidth=0.7)
            axis.spines[["top", "right"]].set_visible(False)
        if before:
            grid[0].legend(frameon=False)
        figure.tight_layout()
        drawn_to = io.StringIO()
        figure.savefig(drawn_to, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    path.write_text(_small(drawn_to.getvalue()))


def _line(axis: Any, points: Points, cost: str, by: str, colour: str, name: str) -> None:
    """The points of the most cases that are equal in what the panel does not vary."""
    equal = "in_flight" if by == "engines" else "engines"
    alike: dict[Any, dict[Any, float]] = {}
    for point in points:
        alike.setdefault(point[equal], {})[point[by]] = point[cost]
    if alike:
        longest = max(alike.values(), key=len)
        axis.plot(
            sorted(longest), [longest[at] for at in sorted(longest)], color=colour, marker="o", markersize=4, label=name
        )


def _small(svg: str) -> str:
    """Take out comments and digits that nobody sees: it is kept beside the text."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r" ?\n *", "\n", svg)
