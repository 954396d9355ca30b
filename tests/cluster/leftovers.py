"""What a test left on the cluster: actors and groups by Ray's state API, processes by the kernel's word.

- A process is this cluster's where its environment names the cluster's own home.
- What ends does so within some seconds: whoever asks waits that long, and no longer.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["Left", "engine_processes", "left_behind", "nothing_left", "until"]

Left = Counter[str]
"""How many of each kind live: an engine that was started again is one, as before."""

_POLL_S: Final = 0.05
_GONE_S: Final = 20.0  # seconds for what was ended to be gone, and for Ray to know
_ENGINES: Final = (b"tests.support.", b"rollout_svc\0engine", b"leash.py")


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> float:
    """Wait until `holds()`: other processes send no event; returns the seconds it took, fails after `timeout_s`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - began


def engine_processes() -> dict[int, str]:
    """Engines of this cluster and their leashes: pid and command line."""
    home = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            said = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if any(word in said for word in _ENGINES) and home in (entry / "environ").read_bytes():
                found[int(entry.name)] = said.replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile
            continue
    return found


def left_behind() -> Left:
    """Count what lives."""
    from ray.util.state import list_actors, list_placement_groups

    actors = [f"actor {actor.class_name}" for actor in list_actors(limit=1000) if actor.state != "DEAD"]
    groups = ["placement group" for group in list_placement_groups(limit=1000) if group.state != "REMOVED"]
    processes = [f"process {said.rpartition(' -m ')[2].split()[0]}" for said in engine_processes().values()]
    return Counter(actors + groups + processes)


def nothing_left(before: Left | None = None, within_s: float = _GONE_S) -> float:
    """Wait until no more lives than before; returns the seconds it took."""
    known = before or Counter()
    try:
        return until(lambda: not left_behind() - known, "nothing is left", within_s)
    except AssertionError:
        raise AssertionError(f"left behind: {left_behind() - known}; {engine_processes()}") from None
