"""A Ray cluster on this machine: raylets, each at a loopback address of its own.

- The head stays; a test that loses a node brings one, and loses that.
- Each node holds one unit of `at-ADDRESS`, so that something can be put there.
- A node that is lost is noticed in about two seconds: Ray itself would take a dozen. So does one that was only hung
  notice that it is out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.cluster import raylets

__all__ = ["HEAD", "OTHERS", "Nodes", "started"]

HEAD: Final = "127.0.1.1"
OTHERS: Final = ("127.0.1.2", "127.0.1.3", "127.0.1.4")
_STORE_BYTES: Final = 128 * 2**20
_HEALTH: Final = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "raylet_liveness_self_check_interval_ms": 1000,
}


class Nodes:
    """The nodes that run.

    Attributes:
        address: of the cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self.address: str = cluster.address
        self._cluster = cluster
        self._next = 5

    def add(self, cpus: float = 4, gpus: int = 0, **resources: float) -> Any:
        """Add a node; returns it, with its `node_ip_address`. Its GPUs are so in name only."""
        address = f"127.0.1.{self._next}"
        self._next += 1
        return self._cluster.add_node(wait=True, **_node(address, cpus, resources, gpus).arguments())

    def lose(self, node: Any) -> None:
        """End a node as a power cut does; idempotent."""
        if node in self._cluster.worker_nodes:
            self._cluster.remove_node(node, allow_graceful=False)

    def hang(self, node: Any) -> None:
        """Stop a node's raylet where it is; what it started goes on."""
        os.kill(_raylet(node).pid, signal.SIGSTOP)

    def go_on(self, node: Any) -> None:
        """Let it go on."""
        os.kill(_raylet(node).pid, signal.SIGCONT)

    def is_over(self, node: Any) -> bool:
        """Whether its raylet has ended, and was collected: its workers take a zombie for one that lives."""
        return _raylet(node).poll() is not None


def _raylet(node: Any) -> Any:
    return node.all_processes["raylet"][0].process


def _node(address: str, cpus: float, resources: dict[str, float], gpus: int = 0) -> raylets.Node:
    return raylets.Node(address, cpus, {f"at-{address}": 1.0, **resources}, _STORE_BYTES, gpus)


@contextmanager
def started() -> Iterator[Nodes]:
    """Start a cluster of four nodes, and connect to it; ended with everything that runs there."""
    how = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 0, "_system_config": _HEALTH}
    others = [_node(address, 4, {}) for address in OTHERS]
    with raylets.started(_node(HEAD, 4, {}), others, {}, **how) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address  # else Ray's state API asks whichever cluster was started last
        yield Nodes(cluster)
