"""The placement groups of this process, made by a keeper that ends with it.

Invariants:

- Blocks: every function is called in a thread.
- No group of ours outlives this process: whatever ends it, the keeper's connection ends, and the groups with it.
- A group that is gone is made anew by whoever needs it: a keeper that was lost took all of its groups along.
- After `close` there is no keeper, also where one was just being made.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

from rollout_svc.config import Resources
from rollout_svc.launching.cluster.holding import hold_here
from rollout_svc.launching.cluster.keeper import GroupKeeper
from rollout_svc.launching.cluster.placing import Node
from rollout_svc.launching.launch import LaunchFailed

__all__ = ["OwnGroups", "group_called", "nodes_alive", "service_name", "state_of"]

_KEEPER_S: Final = 45.0  # seconds for the keeper's process to come up, and for each of its answers
_REACH_S: Final = 10.0  # seconds to connect to it on this node


class OwnGroups:
    """Makes groups, and removes them; `make` is called by one thread at a time, `close` by any."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._keeper: tuple[Any, socket.socket] | None = None
        self._lock = threading.Lock()  # between a keeper that has just come up and the end
        self._over = False
        self.made = False
        """Whether there may be any."""

    def make(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """Make a group; it is placed later. Raises LaunchFailed, or what Ray does."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        self.made = True
        wanted = [dict(bundle) for bundle in bundles]
        name = f"rollout-{service_name()}-{secrets.token_hex(4)}"
        while True:
            self._check()
            before = self._keeper
            keeper = self._have(_hire(self._namespace)) if before is None else before[0]
            try:
                return ray.get(keeper.make.remote(wanted, strategy, name), timeout=_KEEPER_S)
            except ray.exceptions.RayActorError:
                self._let_go()
                self._check()
                if before is None:
                    raise

    def close(self) -> None:
        """End the keeper, and with it every group, for good. Idempotent."""
        self._over = True
        self._let_go()

    def _have(self, hired: tuple[Any, socket.socket]) -> Any:
        """Keep a keeper that was just made; raises LaunchFailed where nobody wants it any more."""
        with self._lock:
            self._keeper = hired
        if self._over:
            self._let_go()
        self._check()
        return hired[0]

    def _check(self) -> None:
        if self._over:
            raise LaunchFailed("the service stops")

    def _let_go(self) -> None:
        with self._lock:
            hired, self._keeper = self._keeper, None
        if hired is not None:
            _end(*hired)


def _end(keeper: Any, held: socket.socket | None) -> None:
    import ray  # noqa: PLC0415 - as above

    if held is not None:
        held.close()
    if ray.is_initialized():  # else Ray would start a cluster to tell it; it ends with the connection as well
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
        held = hold_here(ray.get(keeper.listen.remote(), timeout=_KEEPER_S), _REACH_S)
    except BaseException:
        _end(keeper, held)
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
