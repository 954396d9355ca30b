"""The start of a service as an actor, and the way to one that could not be made."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_svc.errors import ConfigError
from rollout_svc.startup import StartFailed
from tests.cluster.configs import service

WAIT_S = 60.0


def actor_called(name: str) -> Any:
    """The actor, once there is one."""
    import ray

    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, "rollout_svc")
        time.sleep(0.02)
    raise AssertionError(f"no actor {name!r} within {WAIT_S:g} s")


@pytest.fixture
def silent() -> Iterator[str]:
    """An engine that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.timeout(180)
def test_an_actor_that_ends_while_it_is_started_is_a_start_that_failed(ray_cluster: str, silent: str) -> None:
    """P35: it says so in the service's own words, not in Ray's."""
    import ray

    import rollout_svc.ray

    def kill() -> None:
        actor = actor_called("ended")
        ray.get(actor.made.remote(), timeout=WAIT_S)
        ray.kill(actor)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    config = service({"url": silent}, cluster={"address": ray_cluster})
    with pytest.raises(StartFailed, match="'ended' ended before all was there"):
        rollout_svc.ray.start(config, "ended", num_cpus=0.1)
    killing.join(WAIT_S)


@pytest.mark.timeout(180)
def test_a_service_that_could_not_be_made_is_found_and_stopped(ray_cluster: str) -> None:
    """Whatever it failed with: whoever connects has a handle that says so, and that ends it."""
    import ray

    import rollout_svc.ray
    from rollout_svc.ray.actor import GROUPS, ServiceActor

    assert ray_cluster
    remote: Any = ray.remote
    unusable: Any = "no settings at all"
    actors = remote(concurrency_groups=dict(GROUPS))(ServiceActor)
    kept = actors.options(name="unmade", namespace="rollout_svc", num_cpus=0).remote(unusable)
    found = rollout_svc.ray.connect("unmade")
    with pytest.raises(AttributeError):
        ray.get(found.status.remote(), timeout=WAIT_S)
    rollout_svc.ray.stop(found)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(kept.made.remote(), timeout=WAIT_S)


@pytest.mark.timeout(180)
def test_a_start_in_another_cluster_than_the_configured_one_is_refused(ray_cluster: str, silent: str) -> None:
    """P35: by the field's path, before an actor is made; the same place by another name is the same."""
    import ray

    import rollout_svc.ray
    from rollout_svc.tensors.ray_connection import is_cluster

    config = service({"url": silent}, cluster={"address": "127.0.0.1:9"})
    with pytest.raises(
        ConfigError, match=r"cluster\.address: '127\.0\.0\.1:9' is not the cluster that .*nobody listens"
    ):
        rollout_svc.ray.start(config, "elsewhere", num_cpus=0.1)
    with pytest.raises(ConfigError, match=r"cluster\.address: 'local' is not the cluster that "):
        rollout_svc.ray.start(config | {"cluster": {"address": "local"}}, "elsewhere", num_cpus=0.1)
    with pytest.raises(ValueError, match="elsewhere"):
        ray.get_actor("elsewhere", "rollout_svc")
    port = ray_cluster.rpartition(":")[2]
    for same in ("auto", ray_cluster, f"localhost:{port}", f"ray://localhost:{port}"):
        assert is_cluster(same)
    assert not is_cluster("ray://192.0.2.77:1")


@pytest.mark.timeout(180)
def test_a_service_and_its_engines_have_one_namespace(ray_cluster: str, silent: str) -> None:
    """P35: the one that the start is given, unless the configuration names another: then it is refused."""
    import ray

    import rollout_svc.ray

    both = service({"url": silent}, cluster={"address": ray_cluster, "namespace": "ours"})
    with pytest.raises(ConfigError, match=r"cluster\.namespace: 'ours' is not .*'theirs'"):
        rollout_svc.ray.start(both, "spaced", namespace="theirs", num_cpus=0.1)
    config = service({"url": silent}, cluster={"address": ray_cluster})
    handle = rollout_svc.ray.start(config, "spaced", namespace="theirs", wait=False, num_cpus=0.1)
    try:
        assert ray.get_actor("spaced", "theirs") == handle.actor
    finally:
        rollout_svc.ray.stop(handle)


_OUTSIDE = """
import sys, ray, rollout_svc.ray
from rollout_svc.errors import ConfigError
try:
    rollout_svc.ray.start({"tasks": [{"name": "t", "prompts": {"push": True}}], "cluster": {"address": "127.0.0.1:9"}})
except ConfigError as error:
    print(error, ray.is_initialized())
"""


@pytest.mark.timeout(120)
def test_a_driver_in_no_cluster_joins_the_configured_one() -> None:
    """P35: where that is not there it says so, and starts none of its own."""
    done = subprocess.run([sys.executable, "-c", _OUTSIDE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("cluster.address: nobody listens at 127.0.0.1:9: ")
    assert done.stdout.endswith(" False\n")
