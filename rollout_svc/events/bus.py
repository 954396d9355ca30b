"""Where events are emitted, and who hears them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rollout_svc.events.base import Event

__all__ = ["EventBus"]

E = TypeVar("E", bound=Event)


class EventBus:
    """Synchronous fan-out of events to their subscribers."""

    __slots__ = ("_counters", "_on_error", "_subscribers")

    def __init__(self, on_error: Callable[[Event, Exception], None] | None = None) -> None:
        self._subscribers: dict[type[Event], list[Callable[[Any], None]]] = {}
        self._counters: dict[type[Event], list[Callable[..., None]]] = {}
        self._on_error = on_error

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call `handler(event)` for every event of exactly this type."""
        self._subscribers.setdefault(kind, []).append(handler)

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody subscribed to this type: ask before building a costly event."""
        return kind in self._subscribers

    def count(self, kind: type[Event], handler: Callable[..., None]) -> None:
        """Call `handler(*fields)` for every event of this type that is told: for those who only count."""
        self._counters.setdefault(kind, []).append(handler)

    def tell(self, kind: type[Event], *values: Any) -> None:
        """Hand out what comes with every request: as bare fields to those who count, made for those who subscribed."""
        for handler in self._counters.get(kind, ()):
            try:
                handler(*values)
            except Exception as error:  # noqa: BLE001 - as in `emit`
                if self._on_error is not None:
                    self._on_error(kind(*values), error)
        if self.wants(kind):
            self.emit(kind(*values))

    def emit(self, event: Event) -> None:
        """Hand the event to its subscribers, in the order they subscribed."""
        for handler in self._subscribers.get(type(event), ()):
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 - a subscriber's bug must not reach the core
                if self._on_error is not None:
                    self._on_error(event, error)
