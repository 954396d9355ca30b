"""What the phases of an update took, and how far it is.

| phase | from, to |
|---|---|
| `pause` | the call, the report of the pause around it |
| `flatten` | by the publisher's own word: all buckets, into its buffer |
| `transfer` | what else is waited for the publisher |
| `load` | an engine is told of a bucket, or a path, and has it; the slowest engine of each |
| `confirm` | the swap, the version by the engine's own word, its caches flushed, one that was out let in |
| `resume` | the gate opens |

Invariants:

- A phase that did not take place is not told of; the others are in this order.
- `on_change` is called at every step, whoever makes it.
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
        now: the phase under way.
        buckets: how many every engine has.
        bytes: of those.
        total_bytes: of all that will come; None: nobody said.
        error: whom it did not reach, and why; empty: it is under way, or reached all.
        on_change: called when any of these is another.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now: Phase | None = None
        self.buckets = 0
        self.bytes = 0
        self.total_bytes: int | None = None
        self.error = ""
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._began: float | None = None
        self._took = 0.0
        self._seconds: dict[Phase, float] = {}

    def __repr__(self) -> str:
        return f"<Phases {self.seconds} {self.buckets} buckets, {self.bytes} bytes>"

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: round(self._seconds[phase], _DIGITS) for phase in get_args(Phase) if phase in self._seconds}

    @property
    def elapsed_s(self) -> float:
        """All of it, until now or until it ended."""
        return self._took if self._began is None else max(self._clock() - self._began, 0.0)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The update begins and ends with the body."""
        self._began = self._clock()
        try:
            yield
        finally:
            self._took, self._began = self.elapsed_s, None

    def add(self, phase: Phase, seconds: float) -> None:
        """Count time; none that is negative."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + max(seconds, 0.0)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[Callable[[Phase], None]]:
        """Count what the body takes, also where it fails; what it is given says that the rest is another phase's."""
        began, counted = self._clock(), phase

        def turn(to: Phase) -> None:
            nonlocal began, counted
            now = self._clock()
            self.add(counted, now - began)
            began, counted, self.now = now, to, to
            self.on_change()

        try:
            with self.at(phase):
                yield turn
        finally:
            self.add(counted, self._clock() - began)

    @contextmanager
    def at(self, phase: Phase) -> Iterator[None]:
        """It is at this phase; whoever says so counts the time."""
        self.now = phase
        self.on_change()
        try:
            yield
        finally:
            self.now = None

    def expect(self, nbytes: int) -> None:
        """So many bytes will come, in all."""
        self.total_bytes = nbytes
        self.on_change()

    def staged(self, nbytes: int) -> None:
        """Every engine has another bucket."""
        self.buckets += 1
        self.bytes += nbytes
        self.on_change()

    def as_json(self) -> dict[str, Any]:
        """As `status` tells it."""
        return {
            "state": "idle" if self._began is None else "updating",
            "phase": self.now,
            "phases_s": self.seconds,
            "buckets": self.buckets,
            "bytes": self.bytes,
            "total_bytes": self.total_bytes,
            "seconds": round(self.elapsed_s, _DIGITS),
            "error": self.error,
        }
