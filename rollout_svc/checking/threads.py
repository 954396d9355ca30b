"""Threads that a plugin left running in a process of ours: told from within, where alone they have names and lines.

Invariants:

- What ends by itself within a moment is not counted, nor is a worker of a pool that waits for work.
- A thread is told once.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import thread as pools
from types import FrameType
from typing import Final

from rollout_svc.checking import places
from rollout_svc.plugins import PluginSpec

__all__ = ["LEFT", "left"]

_LOOK_S: Final = 0.01
_TOLD: Final[set[threading.Thread]] = set()


def left(moment_s: float) -> list[tuple[str, str]]:
    """Wait so long at most for threads to end; returns the name and the place of each that runs on."""
    end = time.monotonic() + moment_s
    while (running := _running()) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    _TOLD.update(thread for thread, _ in running)
    return [(thread.name, places.of_frame(frame)) for thread, frame in running]


def _running() -> list[tuple[threading.Thread, FrameType | None]]:
    frames = sys._current_frames()  # noqa: SLF001 - the only way to see where a thread is
    found = [(thread, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
    return [
        one for one in found if one[0] not in _TOLD and one[0] is not threading.main_thread() and not _waits(one[1])
    ]


def _waits(frame: FrameType | None) -> bool:
    """Whether this is a worker of a pool, between two jobs."""
    return frame is not None and frame.f_code is pools._worker.__code__  # noqa: SLF001


LEFT: Final = PluginSpec(f"{__name__}:left", {})
"""How a process of ours is asked for it."""
