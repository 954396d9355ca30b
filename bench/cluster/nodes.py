"""A Ray cluster on this machine, for the length of a bench: raylets at loopback addresses of their own.

- It has a home, a folder and a key of its own, so that others beside it are neither found nor touched.
- Everything it started is gone when the block is over.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.process import cpu_time_s

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Nodes", "started"]

HEAD = "127.0.2.1"
STORE_BYTES = 256 * 2**20
"""Of each node's object store: two tensors of 64 MiB, and what Ray keeps free of it."""


class Nodes:
    """The nodes that run; the first is the head, where a service goes."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def actors(self) -> dict[int, str]:
        """Class of each actor that is alive, by the number of its process."""
        import ray  # noqa: PLC0415 - a second to import, for who has a cluster

        state: Any = ray._private.state  # noqa: SLF001 - the state API itself wants a dashboard
        return {one["Pid"]: one["ActorClassName"] for one in state.actors().values() if one["State"] == "ALIVE"}

    @property
    def raylets_cpu_s(self) -> float:
        """CPU time of all raylets so far, seconds."""
        nodes = [self._cluster.head_node, *self._cluster.worker_nodes]
        return sum(cpu_time_s(node.all_processes["raylet"][0].process.pid) for node in nodes)


@contextmanager
def started(others: int) -> Iterator[Nodes]:
    """Start a cluster of a head and so many other nodes, and connect to it.

    Args:
        others: nodes for engines; each has one of what is called `seat`, the head has none.
    """
    own = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as home:
        before = dict(os.environ)  # a socket's path has 107 bytes: the folder's must be short
        os.environ |= own | {"HOME": home, "RAY_TMPDIR": home}
        try:
            yield from _run(Path(home), others)
        finally:
            os.environ.clear()
            os.environ |= before


def _run(home: Path, others: int) -> Iterator[Nodes]:
    import ray  # noqa: PLC0415 - as above
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    head = _node(HEAD, {"head": 1000}) | {"include_dashboard": False, "temp_dir": str(home / "ray")}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(others):
            cluster.add_node(wait=False, **_node(f"127.0.2.{number + 2}", {"seat": 1000}))
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.wait_for_nodes()
        yield Nodes(cluster)
    finally:
        ray.shutdown()
        for node in [*cluster.worker_nodes, cluster.head_node]:
            cluster.remove_node(node, allow_graceful=False)


def _node(address: str, resources: dict[str, float]) -> dict[str, Any]:
    """Make a node with more processors than there are: what is measured waits for none."""
    return {
        "node_ip_address": address,
        "num_cpus": 64,
        "resources": resources,
        "object_store_memory": STORE_BYTES,
    }
