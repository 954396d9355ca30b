"""When each rung of the ladder fires: pure.

Invariants:

- Rungs are ordered, and all lie between the start and the deadline, whatever the two are.
- A rung at fraction f fires at `start + f * (deadline - start)`; configured values are ceilings.
- The last tenth is kept for the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Rungs", "plan_rungs", "reabort_delays"]

_FREEZE_S: Final = 2.0  # seconds an engine gets at most to confirm a freeze
_FREEZE: Final = 0.2
_WAIT: Final = 0.5  # share of the time in which running requests may finish, in mode `wait`
_JUDGES_S: Final = 1.0  # seconds judges get at most before they are cancelled
_JUDGES: Final = 0.1
_HTTP: Final = 0.5
_TASKS: Final = 0.8
_REPORT: Final = 0.9
_FIRST_REABORT_S: Final = 0.05  # seconds: covers requests that reached the engine after the first abort


@dataclass(frozen=True, slots=True)
class Rungs:
    """Absolute times, seconds of the clock the two arguments came from.

    `freeze` and `wait` come before the ladder, in the modes of these names; the others are its rungs.
    """

    freeze: float
    wait: float
    judges: float
    http: float
    tasks: float
    report: float
    deadline: float


def plan_rungs(start: float, deadline: float) -> Rungs:
    """Return the ladder between two moments; a deadline in the past makes every rung due."""
    span = max(0.0, deadline - start)
    return Rungs(
        freeze=start + min(_FREEZE_S, _FREEZE * span),
        wait=start + _WAIT * span,
        judges=start + min(_JUDGES_S, _JUDGES * span),
        http=start + _HTTP * span,
        tasks=start + _TASKS * span,
        report=start + _REPORT * span,
        deadline=start + span,
    )


def reabort_delays(interval_s: float) -> Iterator[float]:
    """Seconds between aborts of the same survivors: from 50 ms, doubling, up to `interval_s`."""
    delay = min(_FIRST_REABORT_S, interval_s)
    while True:
        yield delay
        delay = min(delay * 2, interval_s)
