"""A process of shards reached from inside: the controller's own, or one that a test runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_svc.tensors.shards.plane import Plane

__all__ = ["LocalPeer"]


class LocalPeer:
    """Calls what the data plane would call, in a thread: many ids take longer than an event loop may be held.

    Args:
        plane: owner and fetch buffer of this process.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def drain(self, ids: Sequence[str]) -> str | None:
        """Drain the fetch buffer."""
        await asyncio.to_thread(self._plane.drain, list(ids))
        return self._plane.incarnation

    async def drop(self, ids: Sequence[str]) -> str | None:
        """Drop what the owner has, and drain it from the fetch buffer."""
        await asyncio.to_thread(self._plane.drop, list(ids))
        return self._plane.incarnation

    async def flush(self) -> str | None:
        """Empty the fetch buffer."""
        await asyncio.to_thread(self._plane.flush)
        return self._plane.incarnation

    async def renew(self, ids: Sequence[str]) -> str | None:
        """Begin leases anew."""
        await asyncio.to_thread(self._plane.renew, list(ids))
        return self._plane.incarnation

    async def stats(self) -> Mapping[str, Any]:
        """Return the figures."""
        return await asyncio.to_thread(self._plane.stats)
