"""A reward service on a real socket that answers as a test says, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

__all__ = ["RewardService", "Said", "reward_service"]


@dataclass(frozen=True)
class Said:
    """One answer: a status, a body as JSON or as it is, headers; `cut` closes the connection instead."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    hang: bool = False


class RewardService:
    """Answers one request after the other; the last answer again and again."""

    def __init__(self, *answers: Said) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.left = asyncio.Event()
        self.came = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.came.set()
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if said.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if said.cut:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPInternalServerError
        text = said.body if isinstance(said.body, str) else json.dumps(said.body)
        return web.Response(text=text, status=said.status, headers=said.headers, content_type="application/json")


@asynccontextmanager
async def reward_service(*answers: Said) -> AsyncIterator[RewardService]:
    """Serve for as long as the block runs."""
    service = RewardService(*answers)
    app = web.Application()
    app.router.add_post("/{path:.*}", service.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    service.url = f"http://{host}:{port}"
    try:
        yield service
    finally:
        await runner.cleanup()
