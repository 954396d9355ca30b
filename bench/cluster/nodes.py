"""The cluster of a bench: a head for the service, and nodes for engines, each with more processors than there are."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cluster import raylets
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
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    seats = [_node(f"127.0.2.{number + 2}", {"seat": 1000}) for number in range(others)]
    with raylets.started(_node(HEAD, {"head": 1000}), seats, {"PYTHONPATH": path}) as cluster:
        yield Nodes(cluster)


def _node(address: str, resources: dict[str, float]) -> raylets.Node:
    """Make a node with more processors than there are: what is measured waits for none."""
    return raylets.Node(address, 64, resources, STORE_BYTES)
