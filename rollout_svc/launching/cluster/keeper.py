"""The actor that owns a service's placement groups, and ends when the service's process does.

Ray removes a group with the actor that made it only where that actor is detached: a group of any other stays until the
job ends, which may be a trainer's and last for weeks. So a detached actor makes the groups, and nothing else; it is on
the service's own node, where it is lost with the service, or not at all.

Invariants:

- The service's process holds a connection to this actor. The system closes it when that process ends, however it does;
  this actor ends then, and Ray removes its groups at once.
- Where nobody connects within `CONNECT_S` of its beginning, it ends as well: also where no call ever arrives, for the
  service may be gone before the first.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import threading
from typing import Any, Final

__all__ = ["CONNECT_S", "TOKEN_BYTES", "GroupKeeper"]

CONNECT_S: Final = 60.0
"""Seconds the service has to connect."""
TOKEN_BYTES: Final = 32
_LAST_S: Final = 5.0  # seconds in which Ray ends an actor that says it is done


class GroupKeeper:
    """Makes placement groups, and has them as long as somebody holds on to it."""

    def __init__(self, connect_s: float = CONNECT_S) -> None:
        """Begin to wait for the one who holds on; from another thread, for no loop is known here."""
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._came = asyncio.Event()
        self._left = asyncio.Event()
        self._patience = threading.Timer(connect_s, self._end_if_alone)
        self._patience.daemon = True
        self._patience.start()

    def _end_if_alone(self) -> None:
        if not self._came.is_set():
            os._exit(0)

    async def listen(self) -> tuple[str, int, bytes]:
        """Listen for the one who holds on; returns address, port, and what it has to say first."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        util: Any = ray.util
        address: str = util.get_node_ip_address()
        self._server = await asyncio.start_server(self._met, address, 0)
        return address, self._server.sockets[0].getsockname()[1], self._token

    async def hold(self) -> None:
        """Wait until nobody holds on any more, and end this actor."""
        import ray  # noqa: PLC0415 - as above

        await self._left.wait()
        asyncio.get_running_loop().call_later(_LAST_S, os._exit, 0)
        ended: Any = ray.actor.exit_actor
        ended()

    async def make(self, bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        """Make a group; it is placed later."""
        from ray.util.placement_group import placement_group  # noqa: PLC0415 - as above

        return placement_group(bundles, strategy, name)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Know the one who holds on by what it says; anybody else is shown out."""
        try:
            async with asyncio.timeout(CONNECT_S):
                said = await reader.readexactly(TOKEN_BYTES)
            if hmac.compare_digest(said, self._token):
                self._came.set()
                writer.write(b"k")
                await reader.read()
                self._left.set()
        except (OSError, EOFError, TimeoutError):
            if self._came.is_set():
                self._left.set()
        finally:
            writer.close()
