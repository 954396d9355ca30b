"""The persistent buffer of an update: what each call has to carry so that the receiver never loads what is stale.

A round is one update: buckets, one call each, then `finished`. The buffer they are flattened into, and the event that
orders writing and reading, are handed over once; later calls carry metadata alone, and the receiver reads the buffer it
knows. LMDeploy's consumer (PR #4397, `update_params`) loads stale bytes without a word where a call leaves the buffer
out and the receiver has a clone, where the dtype changed, or where it could not open the event. So:

- The buffer and its event travel on the first call of every round, when the dtype changes, and when the buffer was
  replaced. Never is either left out where the receiver may not have it.
- `require_clone` is false only where the receiver opens events; where it does not, every call carries the buffer, and
  the sender waits for its own writes before it sends (`synchronize`). That is said once.
- After a failure the round begins anew: nobody knows what the receiver has kept.

Invariant: pure: which parts to send follows from what was sent and what came of it, and from nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Parts", "SendRound"]


class Parts(NamedTuple):
    """What one call carries beside its metadata.

    Attributes:
        buffer: the buffer's handle.
        event: the event's handle.
        require_clone: the receiver has to copy the buffer before it answers, and keep nothing of it.
        synchronize: the sender has to wait until its writes are done before it sends.
    """

    buffer: bool
    event: bool
    require_clone: bool
    synchronize: bool


class SendRound:
    """Decides what to send to one receiver; see the module's rules. Used for one update after the other.

    Attributes:
        events: whether the receiver is known to open events; it is believed until it says otherwise.
    """

    __slots__ = ("_known", "events")

    def __init__(self, *, events: bool) -> None:
        self.events = events
        self._known: tuple[int, str] | None = None  # generation and dtype of the buffer the receiver has

    def __repr__(self) -> str:
        return f"<SendRound events={self.events} receiver has {self._known or 'nothing'}>"

    def next(self, generation: int, dtype: str) -> Parts:
        """What the next call carries; it counts as sent once `sent` says so.

        Args:
            generation: of the buffer: another number for another buffer.
            dtype: the buffer's, as the receiver has to see it.
        """
        if not self.events:
            return Parts(buffer=True, event=False, require_clone=True, synchronize=True)
        fresh = self._known != (generation, dtype)
        return Parts(buffer=fresh, event=fresh, require_clone=False, synchronize=False)

    def sent(self, generation: int, dtype: str) -> None:
        """The receiver answered that it has loaded what was sent."""
        if self.events:
            self._known = (generation, dtype)

    def failed(self) -> None:
        """A call failed, or was not answered: the round begins anew, with the buffer."""
        self._known = None

    def ended(self) -> None:
        """`finished` was answered, or the engine sleeps: the receiver has dropped buffer and event."""
        self._known = None

    def no_events(self) -> bool:
        """The receiver cannot open the event: send without from now on. Returns whether this was not known before."""
        self._known = None
        before, self.events = self.events, False
        return before
