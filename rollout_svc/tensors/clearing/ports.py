"""How the controller reaches a process that may have fetched shards, or that owns some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Connect", "Peer"]


class Peer(Protocol):
    """One process. Whoever calls bounds the wait by cancelling it; any error is this process's failure alone.

    Each call may be repeated: what is not there any more is as good as drained. Those that change something return the
    incarnation of the process that did it, or None where it does not say.
    """

    async def drain(self, ids: Sequence[str]) -> str | None:
        """Have it let go of these shards in its fetch buffer."""

    async def drop(self, ids: Sequence[str]) -> str | None:
        """Have it let go of these shards as their owner, and in its fetch buffer."""

    async def flush(self) -> str | None:
        """Have it let go of all that is in its fetch buffer."""

    async def renew(self, ids: Sequence[str]) -> str | None:
        """Have it begin the leases of these shards anew, as their owner."""

    async def stats(self) -> Mapping[str, Any]:
        """Return its figures: `{"incarnation", "owner": {…} | None, "buffer": {…} | None}`, see `shards.plane`."""


Connect = Callable[[str], Peer]
"""Makes the peer of an address; asked once for each."""
