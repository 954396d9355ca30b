"""Whether new work may start, and whether running work may still finish: per lane.

Invariants:

- Closed is a state: whoever looks sees it, at any time; nothing depends on seeing the change itself.
- The epoch of a lane never falls. It rises by one exactly when the right of running requests to finish is
  withdrawn, so `epoch at dispatch == epoch now` is the whole question "does this answer still count?".
- Listeners run synchronously inside the change and are called once per change; the gate does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, get_args

__all__ = ["LANES", "Gate", "Lane"]

Lane = Literal["train", "eval"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Listener = Callable[[Lane], None]


class Gate:
    """Open or closed, and the epoch, per lane."""

    __slots__ = ("_epochs", "_listeners", "_open")

    def __init__(self, *, is_open: bool = True) -> None:
        self._open: dict[Lane, bool] = dict.fromkeys(LANES, is_open)
        self._epochs: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        lanes = " ".join(f"{lane}={'open' if self._open[lane] else 'closed'}@{self._epochs[lane]}" for lane in LANES)
        return f"<Gate {lanes}>"

    def is_open(self, lane: Lane) -> bool:
        """Whether new work of this lane may start."""
        return self._open[lane]

    def epoch(self, lane: Lane) -> int:
        """The lane's epoch now; a request that was dispatched under another one may not count."""
        return self._epochs[lane]

    def close(self, lanes: Iterable[Lane], *, withdraw: bool) -> None:
        """Close lanes; with `withdraw`, running requests lose the right to finish in the same step.

        Closing a closed lane changes nothing, unless the right to finish is withdrawn now and was not before;
        whether it was is the caller's to know, so `withdraw=True` always raises the epoch.
        """
        for lane in tuple(lanes):
            changed = self._open[lane] or withdraw
            self._open[lane] = False
            if withdraw:
                self._epochs[lane] += 1
            if changed:
                self._notify(lane)

    def open(self, lanes: Iterable[Lane]) -> None:
        """Open lanes; opening an open lane changes nothing."""
        for lane in tuple(lanes):
            if not self._open[lane]:
                self._open[lane] = True
                self._notify(lane)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(lane)` at every change; returns the function that ends it."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def _notify(self, lane: Lane) -> None:
        for listener in tuple(self._listeners):
            listener(lane)
