"""What each judger costs: how many calls, how long they waited and ran, why they failed, which were the slowest.

Invariants:

- Waiting and running are told apart: a call waits for its judger's place and for a process, then it runs.
- It takes bounded memory and a few microseconds a call; percentiles are worked out when they are asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

__all__ = ["JudgeFigures"]

_RECENT: Final = 512
"""Calls that percentiles are of."""
_SLOWEST: Final = 3
"""Samples named."""


class JudgeFigures:
    """One judger's calls."""

    __slots__ = ("_longest_queue_s", "_queue_s", "_run_s", "_slowest", "failed", "interrupted", "judged")

    def __init__(self) -> None:
        self.judged = 0
        self.interrupted = 0
        self.failed: Counter[str] = Counter()
        self._queue_s: deque[float] = deque(maxlen=_RECENT)
        self._run_s: deque[float] = deque(maxlen=_RECENT)
        self._longest_queue_s = 0.0
        self._slowest: list[tuple[float, str]] = []

    def ended(self, sample_id: str, queue_s: float, run_s: float, failed: str | None) -> None:
        """Count a call that ended with a verdict or a failure; times in seconds."""
        if failed is None:
            self.judged += 1
        else:
            self.failed[failed] += 1
        self._queue_s.append(queue_s)
        self._run_s.append(run_s)
        self._longest_queue_s = max(self._longest_queue_s, queue_s)
        if len(self._slowest) < _SLOWEST or run_s > self._slowest[-1][0]:
            self._slowest = sorted([*self._slowest, (run_s, sample_id)], reverse=True)[:_SLOWEST]

    def as_json(self, *, running: int, waiting: int) -> dict[str, Any]:
        """The record in status: medians of the last calls, maxima of all."""
        return {
            "judged": self.judged,
            "failed": dict(self.failed),
            "interrupted": self.interrupted,
            "running": running,
            "waiting": waiting,
            "queue_s": {"p50": _median(self._queue_s), "max": self._longest_queue_s},
            "run_s": {"p50": _median(self._run_s), "max": self._slowest[0][0] if self._slowest else 0.0},
            "slowest": [{"sample_id": sample_id, "run_s": run_s} for run_s, sample_id in self._slowest],
        }


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
