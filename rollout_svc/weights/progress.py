"""Tells how far an update is, and once how it ended.

Invariants:

- What changes is told at most twice a second, and is told: a change that came too soon after the last word follows it.
- The end is told once, whatever it was, after the gate has opened again where the update opens it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rollout_svc.events import EventBus, WeightsProgress, WeightUpdateEnded
from rollout_svc.weights.phases import Phases

__all__ = ["telling"]

_EVERY_S: Final = 0.5
"""Between two words: as often as somebody who watches can use it."""


@contextmanager
def telling(bus: EventBus, version: int, kind: str, phases: Phases) -> Iterator[None]:
    """Tell of an update that begins and ends with the body."""
    progress = _Progress(bus, version, kind, phases)
    try:
        with phases.under_way():
            phases.on_change = progress.changed
            yield
    except BaseException as raised:
        phases.error = str(raised) or type(raised).__name__
        raise
    finally:
        progress.end()
        told = (phases.elapsed_s, phases.seconds, phases.buckets, phases.bytes)
        bus.emit(WeightUpdateEnded(version, kind, not phases.error, *told, phases.error))


class _Progress:
    """One update's word."""

    def __init__(self, bus: EventBus, version: int, kind: str, phases: Phases) -> None:
        self._bus, self._version, self._kind, self._phases = bus, version, kind, phases
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Tell it, now or when it is time."""
        if self._timer is not None or not self._bus.wants(WeightsProgress):
            return
        if self._loop.time() >= self._next:
            self._tell()
        else:
            self._timer = self._loop.call_at(self._next, self._tell)

    def end(self) -> None:
        """Nothing more is told."""
        self._phases.on_change = lambda: None
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self._timer = None
        self._next = self._loop.time() + _EVERY_S
        phases = self._phases
        moved = (phases.buckets, phases.bytes, phases.total_bytes)
        self._bus.emit(WeightsProgress(self._version, self._kind, phases.now, *moved, phases.elapsed_s))
