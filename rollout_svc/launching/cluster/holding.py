"""A connection by which an actor knows that somebody still wants it, whatever Ray knows.

Ray tells an actor nothing while its node is out of the cluster: one that hung and comes back, or whose raylet still
hangs, would go on with what somebody else does by then. The system closes a connection when the process that holds it
ends, however it does; and whoever holds it can let go, which arrives as soon as there is anybody to read it.

Invariants:

- Who holds on is known by a token, which travels over Ray; anybody else is shown out, and changes nothing. There is
  one, and then nobody listens any more.
- `left` is set once, when the one who held on let go, ended, or was not reached by the system for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

__all__ = ["KNOCK_S", "Door", "Grip", "Held", "hold", "hold_here"]

KNOCK_S: Final = 60.0
"""Seconds in which whoever connects has to say who it is."""
_TOKEN_BYTES: Final = 32
_WELCOME: Final = b"k"
_ALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds of silence before the system asks whether the other one's machine is there, how often, and how many times."""


class Door(NamedTuple):
    """Where an actor is held on to.

    Attributes:
        address: of its node.
        port: there.
        token: what has to be said first.
    """

    address: str
    port: int
    token: bytes

    def __repr__(self) -> str:
        return f"<Door {self.address}:{self.port}>"


class Held:
    """The actor's side.

    Attributes:
        left: set when nobody holds on any more.
    """

    def __init__(self, met: Callable[[], None] = lambda: None) -> None:
        """Make one; `met` is called when somebody has taken hold."""
        self.left = asyncio.Event()
        self._met = met
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._door: Door | None = None

    async def listen(self, address: str, ports: Sequence[int] = (0,)) -> Door:
        """Listen, at the first of these ports that is free, until somebody has taken hold; asked again, it is there."""
        if self._door is None:
            self._server = await self._serve(address, ports)
            self._door = Door(address, self._server.sockets[0].getsockname()[1], self._token)
        return self._door

    async def _serve(self, address: str, ports: Sequence[int]) -> asyncio.Server:
        *some, last = ports
        for port in some:
            with contextlib.suppress(OSError):  # somebody took it meanwhile
                return await asyncio.start_server(self._knocked, address, port)
        return await asyncio.start_server(self._knocked, address, last)

    def close(self) -> None:
        """Listen no more; whoever holds on still does. Idempotent."""
        if self._server is not None:
            self._server.close()

    async def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Know the one who holds on by what it says."""
        held = False
        try:
            line: socket.socket = writer.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _ALIVE:
                line.setsockopt(socket.IPPROTO_TCP, option, value)
            async with asyncio.timeout(KNOCK_S):
                said = await reader.readexactly(_TOKEN_BYTES)
            if held := hmac.compare_digest(said, self._token):
                self.close()
                self._met()
                writer.write(_WELCOME)
                await reader.read()
        except (OSError, EOFError, TimeoutError):
            return
        finally:
            if held:
                self.left.set()
            writer.close()


class Grip:
    """The other side, in an event loop: held until `let_go`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def over(self) -> bool:
        """Whether the connection has ended, by whomever: then the actor ends."""
        return self._reader.at_eof() or self._writer.is_closing()

    def let_go(self) -> None:
        """End it; idempotent, and waits for nothing."""
        self._writer.close()


async def hold(door: Door, timeout_s: float) -> Grip:
    """Take hold of an actor.

    Raises:
        OSError: it cannot be reached, or lets nobody in; TimeoutError is one.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(door.address, door.port)
            writer.write(door.token)
            if await reader.read(1) != _WELCOME:
                raise ConnectionError(f"{door.address}:{door.port} let go at once")  # noqa: TRY301 - closed below
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    return Grip(reader, writer)


def hold_here(door: Door, timeout_s: float) -> socket.socket:
    """Take hold of an actor without a loop: held as long as the connection is open. Errors as `hold`."""
    line = socket.create_connection((door.address, door.port), timeout=timeout_s)
    try:
        line.sendall(door.token)
        if line.recv(1) != _WELCOME:
            raise ConnectionError(f"{door.address}:{door.port} let go at once")  # noqa: TRY301 - closed below
    except BaseException:
        line.close()
        raise
    return line
