"""The control API of a stage on a port of its own, and a caller that holds every answer against its description."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from rollout_svc.observe.metrics import Metrics
from rollout_svc.rpc.server import serve_http
from tests.support.described import Described
from tests.support.stage import Stage, stage

__all__ = ["TOKEN", "Caller", "api"]

TOKEN = "s3cret"
_DESCRIBED = {token: Described.of_service(token=token) for token in (False, True)}


class Caller:
    """Calls the API and gives back what came; what was not described fails the test."""

    def __init__(self, session: aiohttp.ClientSession, url: str, made: Stage) -> None:
        self.session = session
        self.url = url
        self.stage = made
        self.headers: dict[str, str] = {}
        self.described = _DESCRIBED[made.service.config.service.token is not None]

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Make a call with a JSON body (bytes as they are); status and decoded answer."""
        if body is not None:
            options["data"] = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.session.request(method, self.url + path, **options) as response:
            self.headers = dict(response.headers)
            raw, kind = await response.read(), response.content_type
            answer = orjson.loads(raw) if kind == "application/json" else raw.decode()
        if response.status != 405:  # another method at the same address: no call of the API
            faults = self.described.faults_of_answer(method, path, response.status, kind, answer)
            assert not faults, (method, path, faults)
        if response.ok and body:
            sent = orjson.loads(options["data"])
            assert not self.described.faults_of_body(method, path, sent), (method, path, sent)
        return response.status, answer

    async def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str, Any]:
        """Make a call that is refused: status, type and detail of the error, whose shape is checked."""
        status, answer = await self(method, path, body)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"type", "message", "detail"}
        assert answer["error"]["message"]
        return status, answer["error"]["type"], answer["error"]["detail"]


@asynccontextmanager
async def api(*engines: Any, **settings: Any) -> AsyncIterator[Caller]:
    """Serve a stage on a port of its own."""
    async with (
        stage(*engines, **settings) as made,
        serve_http(made.service, Metrics(made.service.bus, made.service.status).render) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Caller(session, url, made)
