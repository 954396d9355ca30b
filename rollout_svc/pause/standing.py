"""What pauses have closed, and under which number: pure.

Invariants:

- The ticket rises by one at every pause that is not joined, where none has stopped the stage before; it never falls.
- Who names a ticket names the current one. A pause may also name the one that the pause under way started from: it
  joins that one; once it has returned that number is old.
- A lane that a pause closed stays closed at least as strongly, until all of them open together.
- What is closed is drained exactly while a pause has returned with its report and nothing has been asked for since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rollout_svc.errors import Conflict
from rollout_svc.gate import LANES, Lane, Mode, stronger
from rollout_svc.pause.report import PauseReport

__all__ = ["PauseState", "Standing"]

PauseState = Literal["running", "pausing", "paused"]


class Standing:
    """Where pauses stand: whoever makes them is one of these, alone moves it, and does what it says.

    Attributes:
        state: running, pausing or paused.
        ticket: number of the last pause.
        joinable: the ticket that the pause under way started from; None: none is under way.
        asked: pauses that were asked for, joins included.
        paused_s: seconds that pauses took, ever.
        last_report: of the pause that everything is stopped by; None: there is none, or it has not returned.
    """

    def __init__(self) -> None:
        self.state: PauseState = "running"
        self.ticket = 0
        self.joinable: int | None = None
        self.asked = 0
        self.paused_s = 0.0
        self.last_report: PauseReport | None = None
        self._modes: dict[Lane, Mode] = {}

    @property
    def closed(self) -> frozenset[Lane]:
        """Lanes that a pause closed."""
        return frozenset(self._modes)

    @property
    def drained(self) -> frozenset[Lane]:
        """Lanes that are closed and whose pause has returned: nothing runs there, or it is frozen."""
        return self.closed if self.state == "paused" and self.last_report is not None else frozenset()

    def check_resume(self, ticket: int | None) -> None:
        """Raise Conflict unless `ticket` is None or the current one."""
        if ticket is not None and ticket != self.ticket:
            raise self._stale("ticket", ticket, "one")

    def check_pause(self, if_ticket: int | None) -> None:
        """Raise Conflict unless `if_ticket` is None, the current one, or the one that a join may name."""
        allowed = {self.ticket} | ({self.joinable} if self.joinable is not None else set())
        if if_ticket is not None and if_ticket not in allowed:
            raise self._stale("if_ticket", if_ticket, "ticket")

    def weaker(self, mode: Mode, lanes: Iterable[Lane] = LANES) -> frozenset[Lane]:
        """Those of `lanes` that are open, or closed less strongly than `mode` asks."""
        return frozenset(lane for lane in lanes if stronger(mode, self._modes.get(lane)))

    def held_as(self, mode: Mode) -> frozenset[Lane]:
        """Lanes that are closed in exactly this mode."""
        return frozenset(lane for lane, closed in self._modes.items() if closed == mode)

    def _begin(self, lanes: Iterable[Lane], mode: Mode) -> None:
        """A pause that joins none begins: another number, but where everything is stopped already."""
        self.joinable = self.ticket
        self.ticket += self.state != "paused"
        self.state, self.last_report = "pausing", None
        self._close(lanes, mode)

    def _close(self, lanes: Iterable[Lane], mode: Mode) -> None:
        """Close lanes, or close them more strongly."""
        self._modes |= dict.fromkeys(self.weaker(mode, lanes), mode)

    def _end(self) -> None:
        """The pause under way is over, however it ended; what it closed stays so, unless it was opened meanwhile."""
        self.joinable = None
        if self.state == "pausing":
            self.state = "paused"

    def _returned(self, report: PauseReport) -> None:
        """The pause that is over has this report."""
        self.last_report = report
        self.paused_s += report.elapsed_s

    def _open(self) -> tuple[Lane, ...]:
        """Nothing is to be closed any more; returns what was."""
        lanes = tuple(lane for lane in LANES if lane in self._modes)
        self._modes, self.state = {}, "running"
        return lanes

    def _stale(self, name: str, ticket: int, word: str) -> Conflict:
        message = f"{name} {ticket} is old: the current {word} is {self.ticket}"
        return Conflict(message, type="stale_ticket", detail={name: ticket, "current": self.ticket})
