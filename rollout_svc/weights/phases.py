"""What the phases of an update took, and how far it is.

| phase | from, to |
|---|---|
| `pause` | the call, the report of the pause around it |
| `flatten` | by the publisher's own word: all buckets, into its buffer |
| `transfer` | what else is waited for the publisher |
| `load` | an engine is told of a bucket, or a path, and has it; the slowest engine of each |
| `confirm` | the swap, the version by the engine's own word, its caches flushed |
| `resume` | the gate opens |

Invariant: a phase that did not take place is not told of; the others are in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

__all__ = ["Phase", "Phases"]

Phase = Literal["pause", "flatten", "transfer", "load", "confirm", "resume"]
_DIGITS: Final = 6  # microseconds


class Phases:
    """Adds up seconds; see the module's table.

    Attributes:
        buckets: how many every engine has.
        bytes: of those.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.buckets = 0
        self.bytes = 0
        self._clock = clock
        self._seconds: dict[Phase, float] = {}

    def __repr__(self) -> str:
        return f"<Phases {self.seconds} {self.buckets} buckets, {self.bytes} bytes>"

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: round(self._seconds[phase], _DIGITS) for phase in get_args(Phase) if phase in self._seconds}

    def add(self, phase: Phase, seconds: float) -> None:
        """Count time; none that is negative."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + max(seconds, 0.0)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what the body takes, also where it fails."""
        began = self._clock()
        try:
            yield
        finally:
            self.add(phase, self._clock() - began)

    def staged(self, nbytes: int) -> None:
        """Every engine has another bucket."""
        self.buckets += 1
        self.bytes += nbytes

    def as_json(self) -> dict[str, Any]:
        """As `status` tells it."""
        return {"phases_s": self.seconds, "buckets": self.buckets, "bytes": self.bytes}
