"""Whether new work may start, and whether running work may still finish: per lane.

Invariants:

- Closed is a state: whoever looks sees it, at any time; nothing depends on seeing the change itself.
- A closed lane has a mode, keep < wait < abort, which only grows stronger until the lane opens.
- The epoch of a lane never falls. It rises by one exactly when the right of running requests to finish is
  withdrawn, which is when the mode becomes `abort`, so `epoch at dispatch == epoch now` is the whole question "does
  this answer still count?".
- Listeners run synchronously inside the change and are called once per change; the gate does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, get_args

__all__ = ["LANES", "MODES", "Gate", "Lane", "Mode", "stronger"]

Lane = Literal["train", "eval"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Mode = Literal["keep", "wait", "abort"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
"""How a lane is closed, weakest first: `keep` holds what runs, `wait` lets it finish, `abort` ends it."""

Listener = Callable[[Lane], None]


def stronger(mode: Mode, than: Mode | None) -> bool:
    """Whether a mode asks for more than another; than None, an open lane, every mode does."""
    return than is None or MODES.index(mode) > MODES.index(than)


class Gate:
    """Open or closed, and the epoch, per lane."""

    __slots__ = ("_epochs", "_finished", "_listeners", "_modes")

    def __init__(self, *, is_open: bool = True) -> None:
        self._modes: dict[Lane, Mode | None] = dict.fromkeys(LANES, None if is_open else "abort")
        self._epochs: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._finished: set[Lane] = set()
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        lanes = " ".join(f"{lane}={mode or 'open'}@{self._epochs[lane]}" for lane, mode in self._modes.items())
        return f"<Gate {lanes}>"

    def is_open(self, lane: Lane) -> bool:
        """Whether new work of this lane may start."""
        return self._modes[lane] is None

    def mode(self, lane: Lane) -> Mode | None:
        """How the lane is closed; None: it is open."""
        return self._modes[lane]

    def may_finish(self, lane: Lane) -> bool:
        """Whether what runs in this lane may go on to its end, its judge included: open, or closed to wait for it."""
        return self._modes[lane] is None or (self._modes[lane] == "wait" and lane not in self._finished)

    def epoch(self, lane: Lane) -> int:
        """The lane's epoch now; a request that was dispatched under another one may not count."""
        return self._epochs[lane]

    def close(self, lanes: Iterable[Lane], mode: Mode) -> None:
        """Close lanes, or close them more strongly; with `abort`, running requests lose the right to finish.

        Closing a lane that is closed as strongly already changes nothing.
        """
        wanted = frozenset(lanes)
        for lane in LANES:
            if lane in wanted and stronger(mode, self._modes[lane]):
                self._modes[lane] = mode
                if mode == "abort":
                    self._epochs[lane] += 1
                self._notify(lane)

    def finish(self, lanes: Iterable[Lane]) -> None:
        """All that these lanes were closed to wait for has ended: what an agent still comes back with may not go on."""
        wanted = frozenset(lanes)
        for lane in LANES:
            if lane in wanted and self._modes[lane] == "wait" and lane not in self._finished:
                self._finished.add(lane)
                self._notify(lane)

    def open(self, lanes: Iterable[Lane]) -> None:
        """Open lanes; opening an open lane changes nothing."""
        wanted = frozenset(lanes)
        for lane in LANES:
            if lane in wanted and self._modes[lane] is not None:
                self._modes[lane] = None
                self._finished.discard(lane)
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
