"""A process of shards that is an actor of Ray; the verbs of the data plane, as `shards.ray_plane.RayOwner` has them.

Invariants:

- An ObjectRef lives as long as the call it is of: what an actor answers to these verbs is small and is copied.
- ray is imported where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["RayPeer"]

SCHEME: Final = "ray:"


class RayPeer:
    """One actor, which answers `call(verb, ids)`.

    Args:
        actor: its handle, or its address `ray:[NAMESPACE/]ACTOR`; an address is looked up for every call, so that an
            actor that was started anew under its name is found.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def drain(self, ids: Sequence[str]) -> str | None:
        """Drain its fetch buffer."""
        await self._call("drain", list(ids))
        return None

    async def drop(self, ids: Sequence[str]) -> str | None:
        """Drop what it owns, and drain that from its fetch buffer."""
        await self._call("drop", list(ids))
        return None

    async def flush(self) -> str | None:
        """Empty its fetch buffer."""
        await self._call("flush")
        return None

    async def renew(self, ids: Sequence[str]) -> str | None:
        """Begin leases anew."""
        await self._call("renew", list(ids))
        return None

    async def stats(self) -> Mapping[str, Any]:
        """Return its figures."""
        found: Mapping[str, Any] = await self._call("stats")
        return found

    async def _call(self, *given: Any) -> Any:
        actor = self._actor
        if isinstance(actor, str):
            actor = await asyncio.to_thread(_look_up, actor)
        return await asyncio.wrap_future(actor.call.remote(*given).future())


def _look_up(address: str) -> Any:
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    namespace, _, name = address.removeprefix(SCHEME).rpartition("/")
    return ray.get_actor(name, namespace or None)
