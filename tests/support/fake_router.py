"""A hand-written sglang-router in this process: round robin over engines, with the quirks of the real one.

- A request is written anew from a fixed set of fields; the others are dropped. Control routes are 404.
- A client that leaves is felt at the engine. An engine that cannot be reached, or breaks off, is a 500 that names it.
- `tests/router` holds it against the real one.
- After ten such failures an engine is left out, until `forgive`; the real router's sixty seconds are the test's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson
from aiohttp import web

from rollout_svc.engines.router import PASSED, PASSED_SAMPLING

__all__ = ["FakeRouter"]

FAILURES: Final = 10
"""Failures after which an engine is left out."""


class FakeRouter:
    """One router on a port of its own: `async with FakeRouter([engine.url, …]) as router: router.url`.

    Attributes:
        urls: whom it sends to; may be changed at any time.
        lists: whether it says so to whoever asks; one with a key of its own may not.
        hits: paths it was asked, counted.
        refused: paths it answered 404.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.hits: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.lists = True
        self.port = 0
        self._turn = 0
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def forgive(self) -> None:
        """Send to every engine again."""
        self.failures.clear()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._session is not None:
            await self._session.close()

    async def start(self) -> None:
        """Listen, at the port of before where there was one."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/liveness", self._alive)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._not_found)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: connections are cut and refused. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _workers(self, request: web.Request) -> web.Response:
        if not self.lists:
            return await self._not_found(request)
        self.hits[request.path] += 1
        return _json({"workers": [{"url": url, "is_healthy": True} for url in self.urls], "total": len(self.urls)})

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _not_found(self, request: web.Request) -> web.Response:
        self.refused[request.path] += 1
        return web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.Response:
        self.hits[request.path] += 1
        told = orjson.loads(await request.read())
        body = {name: value for name, value in told.items() if name in PASSED}
        body["sampling_params"] = {k: v for k, v in told.get("sampling_params", {}).items() if k in PASSED_SAMPLING}
        open_to = [url for url in self.urls if self.failures[url] < FAILURES]
        if not open_to:
            return _error(503, "no_available_workers", "No available workers (all circuits open or unhealthy)")
        url = open_to[self._turn % len(open_to)]
        self._turn += 1
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        assert self._session is not None
        try:
            async with self._session.post(f"{url}/generate", json=body, headers=headers) as answer:
                passed = {k: v for k, v in answer.headers.items() if k == "Retry-After"}
                body_back = await answer.read()
                return web.Response(
                    body=body_back, status=answer.status, content_type="application/json", headers=passed
                )
        except aiohttp.ClientError as error:
            self.failures[url] += 1
            return _error(
                500, "call_upstream_request_error", f"error sending request for url ({url}/generate): {error}"
            )


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _error(status: int, code: str, message: str) -> web.Response:
    return _json({"error": {"type": "Internal Server Error", "code": code, "message": message}}, status)
