"""A Ray cluster on this machine, of raylets at loopback addresses: for a bench, for tests, for a trainer of a test.

- It has a home, a folder and a key of its own, so that others beside it are neither found nor touched.
- Everything it started is gone when the block is over, and the environment is as it was.
- The head is the node that stays; whoever wants to lose one adds it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Node", "end", "environment_of", "start", "started"]


class Node(NamedTuple):
    """A node that is to be.

    Attributes:
        address: on loopback.
        cpus: that it says it has.
        resources: what else.
        store_bytes: of its object store.
        gpus: that it has in name.
    """

    address: str
    cpus: float
    resources: Mapping[str, float]
    store_bytes: int
    gpus: int = 0

    def arguments(self) -> dict[str, Any]:
        """Spell it as Ray does."""
        return {
            "node_ip_address": self.address,
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "resources": dict(self.resources),
            "object_store_memory": self.store_bytes,
        }


def environment_of(home: str) -> dict[str, str]:
    """What a process has in its environment that has a cluster of its own below `home`."""
    return {
        "HOME": home,
        "RAY_TMPDIR": home,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns that this will change, an error in tests
        # Whoever has a cluster in a parent process may have passed its mode on, and its token lies in another home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def start(home: Path, head: Node, others: Sequence[Node], **how: Any) -> Any:
    """Start the nodes, in an environment that is theirs, and connect to them; returns Ray's own cluster.

    Args:
        home: a folder with a short path: that of a socket has 107 bytes.
        head: the first node.
        others: the rest.
        how: of the head, as Ray spells it.
    """
    import ray  # noqa: PLC0415 - a second to import, for who has a cluster
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    first = head.arguments() | {"include_dashboard": False, "temp_dir": str(home / "ray")} | how
    cluster: Any = Cluster(initialize_head=True, head_node_args=first)
    try:
        for node in others:
            cluster.add_node(wait=False, **node.arguments())
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.wait_for_nodes()
    except BaseException:
        end(cluster)
        raise
    return cluster


def end(cluster: Any) -> None:
    """End the nodes, the head last, without waiting for what they have to say."""
    import ray  # noqa: PLC0415 - as above

    ray.shutdown()
    for node in [*cluster.worker_nodes, cluster.head_node]:
        cluster.remove_node(node, allow_graceful=False)


@contextmanager
def started(head: Node, others: Sequence[Node], env: Mapping[str, str], **how: Any) -> Iterator[Any]:
    """Have a cluster for as long as the block lasts, and be its driver; gives Ray's own.

    Args:
        head: the first node.
        others: the rest.
        env: laid over the environment as well.
        how: of the head, as Ray spells it.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as home:
        before = dict(os.environ)
        os.environ |= environment_of(home) | dict(env)
        try:
            cluster = start(Path(home), head, others, **how)
            try:
                yield cluster
            finally:
                end(cluster)
        finally:
            os.environ.clear()
            os.environ |= before
