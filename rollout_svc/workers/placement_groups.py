"""The placement groups of a Ray cluster, asked for beside the event loop.

Invariants:

- Ray is imported, and connected to, when the first group is looked for: a service that places nothing has none.
- A cluster that does not answer costs a bounded time, and a thread that nobody joins; the loop waits for neither.
"""

from __future__ import annotations

from typing import Any, Final

from rollout_svc.filtering.threads import CallThreads, NoThread
from rollout_svc.launching import LaunchFailed
from rollout_svc.tensors.ray_connection import connect, first_line
from rollout_svc.workers.placement import PlacementGroup, group_named

__all__ = ["RayGroups"]

_ASK_S: Final = 60.0  # seconds to connect and to answer: a cluster that is there takes one or two


class RayGroups:
    """Asks a Ray cluster for its placement groups.

    Args:
        address: of the cluster; `auto` finds the one that runs on this machine.
        timeout_s: seconds it has to answer, the time to connect included.
    """

    def __init__(self, address: str, timeout_s: float = _ASK_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._threads = CallThreads("placement")

    def __repr__(self) -> str:
        return f"<RayGroups at {self._address}>"

    async def find(self, name: str) -> PlacementGroup:
        """Look a group up by its name or id.

        Raises:
            LaunchFailed: the cluster is not to be reached in time, or has no such group.
        """
        where = f"placement.group: Ray at {self._address}"
        try:
            table, addresses = await self._threads.call(self._ask, self._timeout_s)
        except TimeoutError:
            raise LaunchFailed(f"{where} did not answer within {self._timeout_s:g} s") from None
        except NoThread as error:
            raise LaunchFailed(f"{where} does not answer: {error}") from error
        except Exception as error:
            raise LaunchFailed(f"{where} cannot be asked: {type(error).__name__}: {first_line(error)}") from error
        return group_named(name, table, addresses)

    def _ask(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the table of the groups and the addresses of the nodes; in a thread."""
        import ray  # noqa: PLC0415 - takes a second to import: only for who uses it
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415

        connect(self._address)
        nodes: Any = ray.nodes
        return placement_group_table(), {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}
