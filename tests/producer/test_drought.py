"""Rows of filtered groups: told when they are long, ever more seldom, each task's by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.events import EventBus, GroupFinished, GroupsAllFiltered, GroupSettled
from rollout_svc.producer.drought import FIRST, Drought, Droughts


@given(st.lists(st.booleans(), max_size=20 * FIRST))
def test_a_row_is_told_at_each_doubling(outcomes: list[bool]) -> None:
    """It is told exactly when it is `FIRST`, twice, four times, … long; one group that is kept begins it anew."""
    drought, row = Drought(), 0
    for kept in outcomes:
        if kept:
            drought.kept()
            row = 0
        else:
            row += 1
            assert drought.filtered("dull") == (row % FIRST == 0 and (row // FIRST).bit_count() == 1)
        assert drought.in_a_row == row
        assert drought.lasts == (row >= FIRST)


def test_each_task_has_a_row_of_its_own() -> None:
    """A task that keeps its groups does not hide one that keeps none; expired and failed groups end no row."""
    bus, told = EventBus(), list[GroupsAllFiltered]()
    bus.subscribe(GroupsAllFiltered, told.append)
    droughts = Droughts(["a", "b"], bus)
    assert droughts.told() == ""
    for number in range(FIRST):
        bus.emit(GroupSettled(f"a{number}", "a", "filtered", "dull"))
        bus.emit(GroupSettled(f"x{number}", "a", "failed", "judge_error"))
        bus.emit(GroupSettled(f"y{number}", "a", "expired", "stale"))
        bus.emit(GroupSettled(f"b{number}", "b", "filtered", "dull"))
        bus.emit(GroupFinished(f"c{number}", "b", 1.0))
    assert told == [GroupsAllFiltered("a", FIRST, "dull")]
    assert droughts.as_json() == {"a": FIRST, "b": 0}
    assert droughts.told() == f"the last {FIRST} groups of task 'a' were all filtered: dull"
    bus.emit(GroupFinished("c", "a", 1.0))
    assert droughts.told() == ""
