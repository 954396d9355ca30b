"""What every faked engine's HTTP face can do, whatever its dialect: a port of its own, scripts, faults on the wire.

- A call is recorded in `hits` before anything can strike it.
- `script` strikes a call before its route sees it; a fault that is the fate of a generation strikes after.
- It listens on one port for all its life; `restart` is another process on the same port.
"""

from __future__ import annotations

import asyncio
import json
import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from tests.support.faults import Hang, Raw, Refusal, Reset, Status
from tests.support.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

__all__ = ["Face", "as_json", "body_of", "cut", "plain", "reset_connection", "twice"]

KEEPALIVE_S = 3600.0
"""Idle life of a connection, in seconds: longer than any test, so that the client's own limit decides."""
BACKLOG = 4096
"""Listen queue: as many connections as a test may open at once."""


def as_json(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with JSON, written as engines do: without spaces."""
    body = json.dumps(payload, separators=(",", ":")).encode()  # the standard library: it writes NaN where asked
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def body_of(request: web.Request) -> Any:
    """Read the JSON of a request; None where it is none."""
    try:
        return json.loads(await request.read())
    except ValueError:
        return None


def reset_connection(transport: asyncio.BaseTransport | None) -> None:
    """Reset a connection: its peer reads an error, not an end."""
    if isinstance(transport, asyncio.Transport) and not transport.is_closing():
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def plain(request: web.Request, fault: Status | Raw | Reset) -> web.Response:
    """Answer with a fault that needs no answer to be made wrong."""
    match fault:
        case Status():
            headers = dict(fault.headers)
            if isinstance(fault.payload, bytes):
                return web.Response(body=fault.payload, status=fault.code, headers=headers)
            return as_json(fault.payload, fault.code, headers)
        case Raw():
            return web.Response(body=fault.body, content_type=fault.content_type)
        case Reset():
            reset_connection(request.transport)
            return web.Response()  # goes nowhere


async def cut(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    """Send half of an answer."""
    body = json.dumps(payload).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    transport = request.transport
    if transport is not None:
        transport.close()  # what was written leaves first: the client holds half of a body
    return response


async def twice(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    """Send an answer, and on the same connection again."""
    response = as_json(payload)
    await response.prepare(request)
    await response.write_eof()
    if isinstance(request.transport, asyncio.Transport):
        body = response.body
        assert isinstance(body, bytes)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        request.transport.write(head.encode() + body)
    return response


class Face(Watched):
    """One engine on a port of its own: `async with FakeX() as engine: engine.url`."""

    def __init__(self, *, handler_cancellation: bool = False) -> None:
        super().__init__()
        self.handler_cancellation = handler_cancellation
        self.hits: list[tuple[str, str]] = []
        self.scripts: dict[str, list[tuple[Refusal, int | None]]] = {}
        self.hung: dict[str, list[asyncio.Future[bool]]] = {}
        self.restarts = 0
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    def application(self) -> web.Application:
        """The routes."""
        raise NotImplementedError

    def reset(self) -> None:
        """Lose everything, as a process that dies does."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str) -> int:
        """How many calls of a route arrived, answered well or not."""
        return sum(hit == path for _, hit in self.hits)

    async def wait_hits(self, path: str, count: int) -> None:
        """Wait until a route was called at least that many times since the start."""
        await self.until(lambda: self.count(path) >= count, f"{count} calls of {path}")

    # --- scripts

    def script(self, path: str, *refusals: Refusal, times: int | None = 1) -> None:
        """Let the next calls of a route meet these, in order, each `times` times (None: for ever)."""
        self.scripts.setdefault(path, []).extend((refusal, times) for refusal in refusals)

    def heal(self, path: str | None = None) -> None:
        """Forget what was scripted for a route, or for all; calls that hang there go on, late."""
        for name in [path] if path is not None else [*self.scripts, *self.hung]:
            self.scripts.pop(name, None)
            for going_on in self.hung.pop(name, []):
                if not going_on.done():
                    going_on.set_result(True)

    async def scripted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let a call meet what is scripted for its route, else the route."""
        refusal = self._next_refusal(request.path)
        if refusal is None:
            return await handler(request)
        if isinstance(refusal, Hang):
            going_on = asyncio.get_running_loop().create_future()
            self.hung.setdefault(request.path, []).append(going_on)
            if await going_on:
                return await handler(request)
            refusal = Reset()
        return plain(request, refusal)

    def _next_refusal(self, path: str) -> Refusal | None:
        script = self.scripts.get(path)
        if not script:
            return None
        refusal, times = script[0]
        if times is not None:
            script[0] = (refusal, times - 1)
            if times <= 1:
                script.pop(0)
        return refusal

    # --- life

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(
            self.application(),
            handler_cancellation=self.handler_cancellation,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=0.0,
            access_log=None,
        )
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        assert self._runner is not None
        await self._runner.cleanup()

    async def listen(self) -> None:
        """Accept connections, on the port of before where there was one."""
        if self._site is None:
            assert self._runner is not None
            self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=BACKLOG)
            await self._site.start()
            self.port = self._site.port

    async def refuse(self) -> None:
        """Close the listener: new connections are refused; open ones live on."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def kill(self) -> None:
        """Die: the listener is closed, open connections are reset, everything in flight is lost."""
        await self.refuse()
        assert self._runner is not None
        server = self._runner.server
        for connection in list(server.connections if server is not None else ()):
            reset_connection(connection.transport)
        for going_on in [waiting for hung in self.hung.values() for waiting in hung]:
            if not going_on.done():
                going_on.set_result(False)
        self.hung.clear()
        self.reset()
        await asyncio.sleep(0)  # the resets leave, and the handlers find no connection to answer on

    async def restart(self) -> None:
        """Die and come back on the same port, idle and new."""
        await self.kill()
        self.restarts += 1
        await self.listen()
