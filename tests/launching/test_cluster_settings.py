"""What is wrong with the settings of a cluster is said at its place, before anything is started."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError
from rollout_svc.launching.cluster import cluster_problems
from tests.cluster.configs import engine, service

THEIRS = {"bundles": [1, 0], "tensor_parallel": 2, "group": "trainer"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"cluster": {"kind": "ray", "strategy": "scatter"}}, "cluster.strategy"),
        ({"cluster": "slurm"}, "cluster.kind"),
        ({"cluster": {"address": ""}}, "cluster.address"),
        ({"cluster": {"kind": "ray", "head": "10.0.0.1"}}, "cluster.head"),
        ({"cluster": None}, "workers.0.launch.resources"),
        ({"workers": [engine(host="0.0.0.0")]}, "workers.0.launch.host"),
        ({"workers": [engine(resources={"GPU": 0})]}, "workers.0.launch.resources.GPU"),
        ({"workers": [engine(resources={"CPU": -1})]}, "workers.0.launch.resources.CPU"),
        ({"workers": [engine(resources={"GPU": 1.5})]}, "workers.0.launch.resources.GPU"),
        ({"workers": [engine(resources={})]}, "workers.0.launch.resources"),
        ({"workers": [engine(placement=THEIRS)]}, "workers.0.launch.resources"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], path: str) -> None:
    """P35: one problem, with the dotted path of the setting."""
    with pytest.raises(ConfigError) as refused:
        config_from_mapping(service(engine(), **changes) if "workers" not in changes else service() | changes)
    assert [problem.path for problem in refused.value.problems] == [path]


@pytest.mark.unconnected
async def test_a_cluster_that_is_not_there_is_named_in_seconds() -> None:
    """P35: nobody listens at the address, or there is no such name: the address and the system's words."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = config_from_mapping(service(engine(), cluster={"address": address}))
        began = time.monotonic()
        async with asyncio.timeout(30):
            [problem] = await cluster_problems(config)
        assert time.monotonic() - began < 15
    assert problem.path == "cluster.address"
    assert f"no Ray cluster at '{address}': ConnectionRefusedError" in problem.message
    assert await cluster_problems(config.model_copy(update={"cluster": None})) == []
