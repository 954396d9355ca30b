"""A session over HTTP on a port of its own, for real clients; its engine is a script.

`spoken` is all that tests know of it: an address for each API, a key, the sample, and what was recorded.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from rollout_svc.chat_template import ChatTemplate
from rollout_svc.errors import Unauthorized
from rollout_svc.sessions import anthropic, openai
from rollout_svc.sessions.refusals import headers
from rollout_svc.sessions.session import Session
from rollout_svc.tokens import ByteTokenizer
from rollout_svc.tool_calls import read_said
from tests.support.caller import Step, Table, answer

__all__ = ["Site", "Turn", "calling", "spoken", "words"]

_TEMPLATE = (
    "{% for t in tools or [] %}<f>{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
_KEY = "sk-session"


class Turn(NamedTuple):
    """What a turn said, as a client may tell it: its text, and the name and arguments of each call."""

    content: str
    calls: tuple[tuple[str, Any], ...] = ()


def words(text: str, version: int = 0) -> Step:
    """An engine's answer, in bytes."""
    return answer(list(text.encode()), version=version)


def calling(name: str, **arguments: Any) -> str:
    """A call, as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Site:
    """One session that is served."""

    key = _KEY

    def __init__(self, table: Table) -> None:
        table.tokenizer = ByteTokenizer(ChatTemplate(_TEMPLATE, {}).render)
        self.table = table
        self.session = Session("s1", _KEY, table.sample, table.context(), form="hermes", hold_s=0.0)
        self.statuses: list[int] = []
        self.root = ""
        self.after_refusal: Callable[[], None] = lambda: None

    @property
    def openai_url(self) -> str:
        """As `OPENAI_BASE_URL` has it."""
        return f"{self.root}/sessions/s1/v1"

    @property
    def anthropic_url(self) -> str:
        """As `ANTHROPIC_BASE_URL` has it."""
        return f"{self.root}/sessions/s1"

    def recorded(self) -> list[Turn]:
        """The turns as the sample has them: what its ids say where its mask is 1."""
        sample = self.table.sample
        turns: dict[int, list[int]] = {}
        for segment in sample.segments:
            if segment.by_model:
                turns.setdefault(segment.turn, []).extend(segment.ids)
        assert sum(map(len, turns.values())) == sum(sample.loss_mask)
        said = [read_said(bytes(ids).decode(), turn) for turn, ids in turns.items()]
        return [Turn(one.content, tuple((call.name, json.loads(call.arguments)) for call in one.calls)) for one in said]

    def versions(self) -> list[int | None]:
        """The weight version of each turn of the model."""
        spans = [span for segment in self.table.sample.segments if segment.by_model for span in segment.spans]
        return [span.version for span in spans]

    def text(self) -> str:
        """All ids of the sample, prompt and response, as text."""
        return bytes(self.table.sample.prompt_ids + self.table.sample.response_ids).decode()

    def _routes(self) -> web.Application:
        app = web.Application()
        for path, shape in (("/chat/completions", openai), ("/messages", anthropic)):
            app.router.add_post(f"/sessions/s1/v1{path}", self._answering(shape))
        app.router.add_get("/sessions/s1/v1/models", self._models)
        return app

    def _answering(self, shape: ModuleType) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def run(request: web.Request) -> web.StreamResponse:
            try:
                self._check(request)
                asked = shape.read_request(orjson.loads(await request.read()))
                turn = await self.session.turn(asked)
            except Exception as error:  # noqa: BLE001 - the outermost boundary
                status, body = shape.write_error(error)
                self.statuses.append(status)
                self.after_refusal()
                return web.json_response(body, status=status, headers=headers(error))
            self.statuses.append(200)
            if not asked.stream:
                return web.json_response(shape.write_answer(turn, asked))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in shape.stream_answer(turn, asked):
                await response.write(event)
            return response

        return run

    async def _models(self, request: web.Request) -> web.Response:
        self._check(request)
        shape = anthropic if "anthropic-version" in request.headers else openai
        return web.json_response(shape.write_models("policy"))

    def _check(self, request: web.Request) -> None:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(request.headers.get("x-api-key", bearer), _KEY):
            raise Unauthorized("this session has another key")


@asynccontextmanager
async def spoken(*script: Step) -> AsyncIterator[Site]:
    """Serve a session whose engine answers by a script, on loopback."""
    site = Site(Table(*script, max_tokens=2000, on_pause="park"))
    runner = web.AppRunner(site._routes(), shutdown_timeout=1.0)
    await runner.setup()
    try:
        async with asyncio.timeout(30):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            site.root = f"http://{host}:{port}"
            yield site
    finally:
        await runner.cleanup()
