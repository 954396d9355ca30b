"""The report every bench ends with: points beside their floors, as the last line, in JSON.

Invariants:
- `ratio` is `value / floor`; a point is met when its ratio is on the right side of its bound, or when it has none.
- A report is met when all its points are, and it has at least one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Point:
    """One case of a bench.

    Attributes:
        case: Its name.
        value: What was measured.
        floor: What it is measured against, in the same unit and the same run; not zero.
        bound: What the ratio must not exceed ("lower") or fall below ("higher"); None for a figure without a promise.
        better: Which way is good.
    """

    case: str
    value: float
    floor: float
    bound: float | None = None
    better: Better = "lower"

    @property
    def ratio(self) -> float:
        """`value / floor`."""
        return self.value / self.floor

    @property
    def met(self) -> bool:
        """Whether the ratio keeps its bound."""
        if self.bound is None:
            return True
        return self.ratio <= self.bound if self.better == "lower" else self.ratio >= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return the point as the report spells it."""
        return {
            "case": self.case,
            "value": self.value,
            "floor": self.floor,
            "ratio": self.ratio,
            "bound": self.bound,
            "better": self.better,
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """A case that could not be measured: it is in the report all the same, and not met.

    Attributes:
        case: Its name.
        why: What was in the way.
        bound: As a point has it.
    """

    case: str
    why: str
    bound: float | None = None
    met: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the case as the report spells it, without figures."""
        figures = {"value": None, "floor": None, "ratio": None, "bound": self.bound, "better": "lower"}
        return {"case": self.case, **figures, "why": self.why}


def report(name: str, points: Sequence[Point | Missing]) -> dict[str, Any]:
    """Return a bench's report: `{"name", "points", "met"}`."""
    met = bool(points) and all(point.met for point in points)
    return {"name": name, "points": [point.as_dict() for point in points], "met": met}


def print_report(name: str, points: Sequence[Point | Missing]) -> bool:
    """Print a bench's report as one line of JSON, to be the last line of its output.

    Returns:
        Whether every point is met.
    """
    found = report(name, points)
    print(json.dumps(found), flush=True)
    return bool(found["met"])


def progress(text: str) -> None:
    """Print a line at once, so that whoever waits sees that the bench is alive."""
    print(text, flush=True)


def interleaved(value: Callable[[], float], floor: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Measure two things by turns, and return the median of each.

    Args:
        value: Measures ours.
        floor: Measures what ours is held against.
        rounds: Turns each gets; odd, so that the medians are measurements.
    """
    pairs = [(value(), floor()) for _ in range(rounds)]
    return median(ours for ours, _ in pairs), median(theirs for _, theirs in pairs)
