"""The actor that owns a service's placement groups, and ends when the service's process does.

Ray removes a group with the actor that made it only where that actor is detached: a group of any other stays until the
job ends, which may be a trainer's and last for weeks. So a detached actor makes the groups, and nothing else; it is on
the service's own node, where it is lost with the service, or not at all.

Invariants:

- The service's process holds on to this actor (`holding.py`). When that process ends this actor does, and Ray removes
  its groups at once.
- Where nobody connects within `CONNECT_S`, it ends as well: also where who made it ended before it could ask anything.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, Final

from rollout_svc.launching.cluster.holding import Door, Held

__all__ = ["CONNECT_S", "GroupKeeper"]

CONNECT_S: Final = 60.0
"""Seconds the service has to connect."""
_LAST_S: Final = 5.0  # seconds in which Ray ends an actor that says it is done


class GroupKeeper:
    """Makes placement groups, and has them as long as somebody holds on to it."""

    def __init__(self, connect_s: float = CONNECT_S) -> None:
        self._unmet = threading.Timer(connect_s, os._exit, (0,))
        self._unmet.daemon = True
        self._unmet.start()
        self._held = Held(self._unmet.cancel)

    async def listen(self) -> Door:
        """Listen for the one who holds on."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        util: Any = ray.util
        return await self._held.listen(util.get_node_ip_address())

    async def hold(self) -> None:
        """Wait until nobody holds on any more, and end this actor."""
        import ray  # noqa: PLC0415 - as above

        await self._held.left.wait()
        asyncio.get_running_loop().call_later(_LAST_S, os._exit, 0)
        ended: Any = ray.actor.exit_actor
        ended()

    async def make(self, bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        """Make a group; it is placed later."""
        from ray.util.placement_group import placement_group  # noqa: PLC0415 - as above

        return placement_group(bundles, strategy, name)
