"""An engine that writes down what the router sends it, and answers what the test tells it to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

__all__ = ["Received", "Recorder"]


@dataclass(frozen=True, slots=True)
class Received:
    """One generation as it arrived."""

    body: dict[str, Any]
    headers: dict[str, str]


class Recorder:
    """One engine on a port of its own: `async with Recorder() as engine: engine.url`.

    Attributes:
        received: generations, in order.
        others: methods and paths of everything else.
        status: what generations are answered with.
        hold: generations wait until it is set.
        left: generations whose client went away.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.others: set[str] = set()
        self.status = 200
        self.hold = asyncio.Event()
        self.hold.set()
        self.inside = 0
        self.left = 0
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the port it had before if it had one."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Refuse connections from now on. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path != "/generate":
            self.others.add(f"{request.method} {request.path}")
            return web.json_response({"model_path": "m", "served_model_name": "m", "is_generation": True, "tp_size": 1})
        body = orjson.loads(await request.read())
        self.received.append(Received(body, dict(request.headers)))
        self.inside += 1
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.inside -= 1
        headers = {"Retry-After": "7"} if self.status != 200 else {}
        return web.json_response({"by": self.url, "rid": body.get("rid")}, status=self.status, headers=headers)
