"""What Ray's state API says is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["actors_alive", "groups_alive", "until"]


def actors_alive() -> list[Any]:
    """Every actor that is not dead."""
    from ray.util.state import list_actors

    return [actor for actor in list_actors(_cluster(), timeout=20, limit=1000) if actor.state != "DEAD"]


def groups_alive() -> list[Any]:
    """Every placement group that was not removed."""
    from ray.util.state import list_placement_groups

    return [group for group in list_placement_groups(_cluster(), timeout=20, limit=1000) if group.state != "REMOVED"]


def _cluster() -> str:
    """The address of this test's cluster: the API itself would take the one that was started last on this machine."""
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


def until(holds: Callable[[], object], what: str, timeout_s: float = 40.0) -> float:
    """Wait until something holds; returns the seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began
