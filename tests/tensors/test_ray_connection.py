"""One connection to a cluster, whoever wants it first; over a Ray that only counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from rollout_svc.tensors.ray_connection import connect, join
from rollout_svc.tensors.ray_store import RayStore

WAIT_S = 10.0


class SlowRay(ModuleType):
    """A Ray that takes its time to connect, and is confused by a second caller meanwhile, as Ray is."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.go = threading.Event()
        self.entered = threading.Event()
        self.calls = 0
        self._connected = False

    def is_initialized(self) -> bool:
        """Whether it has connected."""
        return self._connected

    def init(self, **_: object) -> None:
        """Connect, once it may."""
        self.calls += 1
        self.entered.set()
        assert self.go.wait(WAIT_S)
        self._connected = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRay]:
    """Put it in Ray's place."""
    ray = SlowRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    yield ray
    ray.go.set()


def test_a_store_and_a_launcher_that_connect_at_once_connect_once(slow: SlowRay) -> None:
    """Whoever comes second waits for the first, and finds the process connected."""
    callers = [threading.Thread(target=call, daemon=True) for call in (RayStore, lambda: connect("auto"))]
    callers[0].start()
    assert slow.entered.wait(WAIT_S)
    callers[1].start()
    callers[1].join(0.05)  # long enough to be at the door, where it is to stay
    slow.go.set()
    for caller in callers:
        caller.join(WAIT_S)
    assert (slow.calls, slow.is_initialized()) == (1, True)


def test_who_waits_for_a_connection_that_hangs_is_told(slow: SlowRay) -> None:
    """By its own bound, also where another hangs before it; the address is named."""
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"no Ray cluster at auto answered within 0\.05 s"):
            join("auto", 0.05)
    assert slow.calls == 1
