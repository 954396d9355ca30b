"""The keeper of the placement groups: it is never left, however its service ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollout_svc.launching.cluster.groups import OwnGroups
from rollout_svc.launching.cluster.keeper import GroupKeeper
from rollout_svc.launching.launch import LaunchFailed

WAIT_S = 60.0


def keepers(namespace: str) -> list[str]:
    """The keepers that a namespace has."""
    import ray

    util: Any = ray.util
    return [one["name"] for one in util.list_named_actors(all_namespaces=True) if one["namespace"] == namespace]


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.02)


@pytest.mark.timeout(180)
def test_a_service_that_stops_while_its_groups_are_made_leaves_no_keeper(ray_cluster: str) -> None:
    """P14: whatever was under way is ended with the rest, and nothing is made after that."""
    assert ray_cluster
    own = OwnGroups("stopped-early")

    def make() -> None:
        with contextlib.suppress(LaunchFailed):  # it says that the service stops, where that came first
            own.make([{"CPU": 1.0}], "PACK")

    making = threading.Thread(target=make, daemon=True)
    making.start()
    until(lambda: keepers("stopped-early"), "a keeper is being made")
    own.close()
    making.join(WAIT_S)
    with pytest.raises(LaunchFailed, match="the service stops"):
        own.make([{"CPU": 1.0}], "PACK")
    until(lambda: not keepers("stopped-early"), "no keeper is left")


@pytest.mark.timeout(120)
def test_a_keeper_that_was_asked_nothing_ends(ray_cluster: str) -> None:
    """Its service may end in the moment after it was made: nobody else would ever end it."""
    import ray

    assert ray_cluster
    options: Any = {"name": "unmet", "namespace": "unmet", "lifetime": "detached", "num_cpus": 0}
    remote: Any = ray.remote(GroupKeeper)
    remote.options(**options).remote(0.5)
    assert keepers("unmet")
    until(lambda: not keepers("unmet"), "it ended")
