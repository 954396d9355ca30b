"""The gate: a state per lane, an epoch that never falls, and listeners told once per change."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.gate import LANES, MODES, Gate, Lane, Mode

lanes = st.lists(st.sampled_from(LANES), unique=True)
steps = st.lists(st.tuples(st.sampled_from(["open", *MODES]), lanes), max_size=30)


@given(st.booleans(), steps)
def test_the_gate_is_its_calls_and_nothing_else(is_open: bool, calls: list[tuple[str, list[Lane]]]) -> None:
    """A closed lane has the strongest mode since it was open; the epoch counts aborts; listeners hear changes only."""
    gate = Gate(is_open=is_open)
    heard: list[Lane] = []
    gate.subscribe(heard.append)
    strength: dict[Lane, int] = dict.fromkeys(LANES, 0 if is_open else len(MODES))
    epochs: dict[Lane, int] = dict.fromkeys(LANES, 0)
    expected: list[Lane] = []
    for verb, which in calls:
        asked = ("open", *MODES).index(verb)
        before = dict(strength)
        for lane in which:
            strength[lane] = max(asked, strength[lane]) if asked else 0
            epochs[lane] += verb == "abort" and strength[lane] > before[lane]
        expected += [lane for lane in LANES if strength[lane] != before[lane]]
        if verb == "open":
            gate.open(which)
        else:
            gate.close(which, cast("Mode", verb))
        assert [gate.mode(lane) for lane in LANES] == [(None, *MODES)[strength[lane]] for lane in LANES]
        assert [gate.is_open(lane) for lane in LANES] == [strength[lane] == 0 for lane in LANES]
        assert [gate.may_finish(lane) for lane in LANES] == [strength[lane] in (0, 2) for lane in LANES]
        assert {lane: gate.epoch(lane) for lane in LANES} == epochs
        assert heard == expected


def test_one_lane_does_not_move_the_other() -> None:
    """Withdrawing a lane leaves the other's requests the right to finish."""  # P15
    gate = Gate()
    gate.close(["train"], "abort")
    assert (gate.is_open("train"), gate.epoch("train")) == (False, 1)
    assert (gate.is_open("eval"), gate.epoch("eval")) == (True, 0)


def test_closing_without_withdrawing_keeps_the_epoch() -> None:
    """Modes that let running requests finish close the gate under the same epoch; withdrawing later raises it."""  # P3
    gate = Gate()
    gate.close(LANES, "wait")
    assert (gate.is_open("train"), gate.epoch("train")) == (False, 0)
    gate.close(LANES, "abort")
    gate.open(LANES)
    assert (gate.is_open("train"), gate.epoch("train")) == (True, 1)


def test_listeners_see_the_new_state_and_may_leave() -> None:
    """A listener runs inside the change, sees it done, and hears nothing after it unsubscribed."""
    gate = Gate()
    seen: list[tuple[Lane, bool]] = []
    leave = gate.subscribe(lambda lane: seen.append((lane, gate.is_open(lane))))
    gate.close(["eval"], "keep")
    gate.open(["eval"])
    leave()
    leave()
    gate.close(["eval"], "abort")
    assert seen == [("eval", False), ("eval", True)]


def test_a_listener_that_leaves_during_a_change_takes_nobody_along() -> None:
    """Unsubscribing while being told does not keep the change from the next listener."""
    gate = Gate()
    heard: list[str] = []

    def first(_: Lane) -> None:
        heard.append("first")
        leave()

    leave = gate.subscribe(first)
    gate.subscribe(lambda _: heard.append("second"))
    gate.close(["train"], "keep")
    gate.open(["train"])
    assert heard == ["first", "second", "second"]


def test_a_wait_that_is_over_lets_nothing_more_go_on() -> None:
    """Once all that a lane waited for has ended, nothing may finish behind it, under the same epoch."""  # P9 P13
    gate = Gate()
    heard: list[Lane] = []
    gate.close(["train"], "wait")
    gate.subscribe(heard.append)
    gate.finish(LANES)
    gate.finish(LANES)
    assert (gate.may_finish("train"), gate.epoch("train"), gate.may_finish("eval")) == (False, 0, True)
    assert heard == ["train"]
    gate.open(LANES)
    gate.close(["train"], "wait")
    assert gate.may_finish("train")
