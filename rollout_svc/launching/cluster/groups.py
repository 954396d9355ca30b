"""The placement groups of this process, made by a keeper that ends with it.

Invariants:

- Blocks: every function is called in a thread.
- No group of ours outlives this process: whatever ends it, the keeper's connection ends, and the groups with it.
- A group that is gone is made anew by whoever needs it: a keeper that was lost took all of its groups along.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final

from rollout_svc.config import Resources
from rollout_svc.launching.cluster.keeper import TOKEN_BYTES, GroupKeeper
from rollout_svc.launching.cluster.placing import Node
from rollout_svc.launching.launch import LaunchFailed

__all__ = ["OwnGroups", "group_called", "nodes_alive", "service_name", "state_of"]

_KEEPER_S: Final = 45.0  # seconds for the keeper's process to come up, and for each of its answers
_REACH_S: Final = 10.0  # seconds to connect to it on this node


class OwnGroups:
    """Makes groups, and removes them; used by one thread at a time."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._keeper: Any = None
        self._held: socket.socket | None = None

    @property
    def made(self) -> bool:
        """Whether there may be any."""
        return self._keeper is not None

    def make(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """Make a group; it is placed later. Raises LaunchFailed, or what Ray does."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        name = f"rollout-{service_name()}-{secrets.token_hex(4)}"
        wanted = [dict(bundle) for bundle in bundles]
        if self._keeper is not None:
            try:
                return ray.get(self._keeper.make.remote(wanted, strategy, name), timeout=_KEEPER_S)
            except ray.exceptions.RayActorError:
                self.close()
        self._keeper, self._held = _hire(self._namespace)
        return ray.get(self._keeper.make.remote(wanted, strategy, name), timeout=_KEEPER_S)

    def close(self) -> None:
        """End the keeper, and with it every group. Idempotent."""
        import ray  # noqa: PLC0415 - as above

        keeper, self._keeper = self._keeper, None
        if self._held is not None:
            self._held.close()
        if keeper is not None:
            ray.kill(keeper)


def _hire(namespace: str) -> tuple[Any, socket.socket]:
    """Make a keeper on this node, and hold on to it."""
    import ray  # noqa: PLC0415 - as above
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"rollout-{service_name()}-groups-{secrets.token_hex(4)}"
    options: Any = {"name": name, "namespace": namespace, "lifetime": "detached", "max_restarts": 0, "num_cpus": 0}
    keeper: Any = ray.remote(GroupKeeper).options(scheduling_strategy=here, **options).remote()
    held = None
    try:
        keeper.hold.remote()
        address, port, token = ray.get(keeper.listen.remote(), timeout=_KEEPER_S)
        held = socket.create_connection((address, port), timeout=_REACH_S)
        held.sendall(token[:TOKEN_BYTES])
        if held.recv(1) != b"k":
            raise LaunchFailed("the keeper of the placement groups let go at once")  # noqa: TRY301 - ended below
    except BaseException:
        if held is not None:
            held.close()
        ray.kill(keeper)
        raise
    return keeper, held


def service_name() -> str:
    """What this process is called in names that people read: as its actor, else by its number."""
    import ray  # noqa: PLC0415 - as above

    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    if actor is None:
        return f"serve-{os.getpid()}"
    return context.get_actor_name() or actor[:8]


def state_of(group: Any) -> str:
    """What Ray says of a group: `CREATED`, `PENDING`, `RESCHEDULING`, `REMOVED`."""
    from ray.util.placement_group import placement_group_table  # noqa: PLC0415 - as above

    return str(placement_group_table(group).get("state", "REMOVED"))


def group_called(name: str) -> Any:
    """Find somebody else's group by its name or id, in whatever namespace it is. Raises LaunchFailed."""
    from ray._raylet import PlacementGroupID  # noqa: PLC0415 - as above
    from ray.util.placement_group import PlacementGroup, placement_group_table  # noqa: PLC0415

    table: dict[str, dict[str, Any]] = placement_group_table()
    found = [key for key, entry in table.items() if name in (key, entry["name"]) and entry["state"] != "REMOVED"]
    if len(found) != 1:
        raise LaunchFailed(f"placement.group: there are {len(found)} placement groups {name!r}")
    identity: Any = PlacementGroupID
    return PlacementGroup(identity(bytes.fromhex(found[0])))


def nodes_alive() -> list[Node]:
    """The nodes that are alive, and what they have."""
    import ray  # noqa: PLC0415 - as above

    state: Any = ray._private.state  # noqa: SLF001 - what is free where is told nowhere else
    free: dict[str, dict[str, float]] = state.available_resources_per_node()
    nodes: Any = ray.nodes
    return [
        Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in nodes()
        if node["Alive"]
    ]
