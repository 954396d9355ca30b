"""From points to laws: the exponent of each cost in engines and in requests, and what it comes to further on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["exponent", "growth", "told"]

Point = Mapping[str, Any]
_TOTALS: Final[Mapping[str, str]] = {
    "start_us": "engines",
    "dispatch_us": "in_flight",
    "sample_us": "in_flight",
    "pause_us": "in_flight",
    "again_us": "in_flight",
}
"""Costs for each of something: times how many there are, they are the whole."""
_WHOLE: Final = ("status_ms", "status_bytes", "metrics_bytes", "report_bytes", "stuck_ms", "collection_ms")


def exponent(few: float, many: float, factor: float) -> float:
    """By which power something grew while what it depends on grew by a factor: 0 not at all, 1 linear, 2 quadratic."""
    return math.log(max(many, 1e-12) / max(few, 1e-12)) / math.log(factor)


def _whole(point: Point, name: str) -> float:
    unit = _TOTALS.get(name)
    return float(point[name]) * (1 if unit is None else point[unit])


def growth(points: Sequence[Point]) -> Iterator[str]:
    """A line for each cost: its power in engines at equal requests, and in requests at equal engines."""
    pairs = (("engines", "in_flight"), ("in_flight", "engines"))
    for name in (*_TOTALS, *_WHOLE):
        words = []
        for grown, equal in pairs:
            alike: dict[Any, list[Point]] = {}
            for point in points:
                alike.setdefault(point[equal], []).append(point)
            longest = max(alike.values(), key=len, default=[])
            if len(longest) > 1:
                few, many = (end(longest, key=lambda point: point[grown]) for end in (min, max))
                power = exponent(_whole(few, name), _whole(many, name), many[grown] / few[grown])
                words.append(f"{grown}^{power:.2f} ({few[grown]} to {many[grown]} at {longest[0][equal]} {equal})")
        yield f"{name.rpartition('_')[0]} as a whole: {', '.join(words)}"


def told(point: Point) -> str:
    """One point as a line."""
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in point.items()
    )
