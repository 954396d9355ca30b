"""Events: values, handed to whoever asked, and harmless to whoever emits."""

import dataclasses

import pytest

from rollout_svc import events
from rollout_svc.events import Event, EventBus, GroupAdmitted, GroupHandedBack, Resumed

ADMITTED = GroupAdmitted("g", "t", 2)


def test_subscribers_get_exactly_their_type_in_order() -> None:
    """An event reaches those who subscribed to its type, in the order they did, and nobody else."""
    bus = EventBus()
    heard: list[tuple[str, Event]] = []
    bus.subscribe(GroupAdmitted, lambda event: heard.append(("first", event)))
    bus.subscribe(GroupHandedBack, lambda event: heard.append(("other", event)))
    bus.subscribe(Event, lambda event: heard.append(("base", event)))
    bus.subscribe(GroupAdmitted, lambda event: heard.append(("second", event)))
    bus.emit(ADMITTED)
    assert heard == [("first", ADMITTED), ("second", ADMITTED)]


def test_wants_says_who_listens() -> None:
    """A costly event need not be built where nobody subscribed to its type."""
    bus = EventBus()
    assert not bus.wants(GroupAdmitted)
    bus.subscribe(GroupAdmitted, lambda _: None)
    assert bus.wants(GroupAdmitted)
    assert not bus.wants(GroupHandedBack)


def test_what_is_told_reaches_those_who_count_and_those_who_subscribed() -> None:
    """Told, an event is bare fields to those who count, and is made only where somebody subscribed."""
    reported: list[Event] = []
    bus = EventBus(on_error=lambda event, _: reported.append(event))
    counted: list[tuple[object, ...]] = []
    heard: list[Event] = []

    def fails(*_: object) -> None:
        raise RuntimeError

    bus.count(GroupAdmitted, fails)
    bus.count(GroupAdmitted, lambda *fields: counted.append(fields))
    bus.tell(GroupAdmitted, "g", "t", 2)
    assert (counted, heard) == ([("g", "t", 2)], [])
    bus.subscribe(GroupAdmitted, heard.append)
    bus.tell(GroupAdmitted, "g", "t", 2)
    assert (len(counted), heard, reported) == (2, [ADMITTED], [ADMITTED, ADMITTED])


def test_a_subscribers_bug_stays_with_it() -> None:
    """A subscriber that raises is reported with its event; the next one and the emitter notice nothing."""
    reported: list[tuple[Event, Exception]] = []
    bus = EventBus(on_error=lambda event, error: reported.append((event, error)))
    error = RuntimeError("a bug")
    heard: list[Event] = []

    def fails(_: Event) -> None:
        raise error

    bus.subscribe(GroupAdmitted, fails)
    bus.subscribe(GroupAdmitted, heard.append)
    bus.emit(ADMITTED)
    assert (reported, heard) == ([(ADMITTED, error)], [ADMITTED])


def test_without_an_error_hook_a_bug_still_stays_outside() -> None:
    """Nobody is told, and nobody is hurt."""
    bus = EventBus()

    def fails(_: Event) -> None:
        raise RuntimeError

    bus.subscribe(GroupAdmitted, fails)
    bus.emit(ADMITTED)


def test_events_are_values() -> None:
    """Every event is frozen: nobody downstream can change what the next one sees."""
    kinds = [kind for name in events.__all__ if isinstance(kind := getattr(events, name), type)]
    records = [kind for kind in kinds if issubclass(kind, Event)]
    assert len(records) > 10
    for kind in records:
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ADMITTED.size = 3  # type: ignore[misc]
    assert Resumed(1, ("train",)) == Resumed(1, ("train",))
