"""Where pauses stand: numbers, lanes, and who may name what; P9 P11."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_svc.errors import Conflict
from rollout_svc.gate import LANES, MODES, Lane, Mode
from rollout_svc.pause.report import PauseReport
from rollout_svc.pause.standing import Standing

SOME_LANES = st.frozensets(st.sampled_from(LANES), min_size=1)
SOME_MODE = st.sampled_from(MODES)


def report(ticket: int) -> PauseReport:
    """What a pause found that took two seconds."""
    return PauseReport(ticket, "abort", 2.0, [], {}, [], [], {})


class Standings(RuleBasedStateMachine):
    """Pauses, joins, ends and openings in any order, beside the plainest account of them there is."""

    def __init__(self) -> None:
        super().__init__()
        self.standing = Standing()
        self.history: list[str] = []
        self.before = 0
        self.climbing = False
        self.stopped = False
        self.reported = 0
        self.strongest: dict[Lane, int] = {}
        self.numbers = 0

    @rule(lanes=SOME_LANES, mode=SOME_MODE)
    def pause(self, lanes: frozenset[Lane], mode: Mode) -> None:
        """One that joins what is under way, or begins; none joins what was opened under way, and is refused."""
        if self.climbing and not self.stopped:
            return
        if self.climbing:
            self.standing._close(lanes, mode)
        else:
            self.before = self.numbers
            self.numbers += not self.stopped
            self.standing._begin(lanes, mode)
        self.climbing, self.stopped = True, True
        for lane in lanes:
            self.strongest[lane] = max(self.strongest.get(lane, -1), MODES.index(mode))

    @rule(found=st.booleans())
    def end(self, found: bool) -> None:
        """The pause under way ends, with a report or an error."""
        if not self.climbing:
            return
        self.standing._end()
        if found:
            self.standing._returned(report(self.numbers))
            self.reported += 1
        self.climbing = False

    @rule()
    def open(self) -> None:
        """Everything opens: after a pause, or because it was refused while it climbed."""
        assert self.standing._open() == tuple(lane for lane in LANES if lane in self.strongest)
        self.stopped, self.strongest = False, {}

    @invariant()
    def the_number_counts_pauses(self) -> None:
        """P11: +1 at every pause that is not joined, never less."""
        assert self.standing.ticket == self.numbers
        assert self.standing.paused_s == 2.0 * self.reported

    @invariant()
    def only_two_numbers_are_taken(self) -> None:
        """P11: the current number, and of a pause the one that the pause under way began from; no other."""
        pausing, resuming = {self.numbers} | ({self.before} if self.climbing else set()), {self.numbers}
        for number in range(-1, self.numbers + 2):
            assert taken(self.standing.check_pause, number) == (number in pausing)
            assert taken(self.standing.check_resume, number) == (number in resuming)
        self.standing.check_pause(None)
        self.standing.check_resume(None)

    @invariant()
    def lanes_only_close_more_strongly(self) -> None:
        """P9: a lane that was closed is closed, as strongly as it ever was asked to be."""
        assert self.standing.closed == set(self.strongest)
        for strength, mode in enumerate(MODES):
            assert self.standing.weaker(mode) == {lane for lane in LANES if self.strongest.get(lane, -1) < strength}
            assert self.standing.held_as(mode) == {lane for lane in LANES if self.strongest.get(lane) == strength}

    @invariant()
    def nothing_is_drained_on_the_way(self) -> None:
        """P9: lanes are drained only under a pause that has returned."""
        assert self.standing.drained <= self.standing.closed
        assert not (self.standing.drained and (self.climbing or not self.stopped))
        assert self.standing.state == ("running" if not self.stopped else "pausing" if self.climbing else "paused")


TestStandings = Standings.TestCase


def taken(check: object, number: int) -> bool:
    """Whether a number passes a check."""
    assert callable(check)
    with suppress(Conflict):
        check(number)
        return True
    return False


def test_an_old_number_is_refused_with_both() -> None:
    """P11: whoever names an old number is told it, and the current one."""
    standing = Standing()
    standing._begin(LANES, "abort")
    standing._end()
    for name, check in (("if_ticket", standing.check_pause), ("ticket", standing.check_resume)):
        with pytest.raises(Conflict, match=rf"^{name} 0 is old: the current (one|ticket) is 1$") as refused:
            check(0)
        assert (refused.value.type, refused.value.detail) == ("stale_ticket", {name: 0, "current": 1})


def test_a_lane_is_drained_once_its_pause_has_returned() -> None:
    """P9: weights may move between the report and the next pause, or the resume; not before and not after."""
    standing = Standing()
    standing._begin(["train"], "wait")
    assert standing.drained == frozenset()
    standing._end()
    assert standing.drained == frozenset()
    standing._returned(report(1))
    assert standing.drained == {"train"}
    standing._begin(["eval"], "abort")
    assert standing.drained == frozenset()
