"""A stage whose agents come over HTTP: its service, its engine, and a client of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from rollout_svc.rpc.server import serve_http
from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import Stage, stage

__all__ = ["SESSION", "TEMPLATE", "Client", "asked", "ids", "session_site"]

SESSION = "rollout_agents.session:SessionAgent"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
QUESTION = {"role": "user", "content": "hi"}


def ids(text: str) -> list[int]:
    """What the engine answers, in bytes."""
    return list(text.encode())


def asked(engine: FakeSGLang, place: int = -1) -> str:
    """What the engine was asked, as text."""
    return bytes(engine.requests[place].prompt_ids).decode()


class Client:
    """Someone who speaks to one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str | None = None) -> None:
        self.http = http
        self.url = url
        self.session_id = ""
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.history: list[dict[str, Any]] = []
        self.retry_after: str | None = None

    async def take(self, wait_s: float = 10.0) -> dict[str, Any]:
        """Take the session of the next sample."""
        status, told = await self.post("/sessions", {"task": "t", "wait_s": wait_s})
        assert status == 200, told
        self.session_id = told["session_id"]
        self.headers = {"Authorization": f"Bearer {told['api_key']}"}
        answer: dict[str, Any] = told
        return answer

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Call; the status, and the answer's JSON, or its text."""
        async with self.http.post(self.url + path, data=orjson.dumps(body or {}), headers=self.headers) as response:
            self.retry_after = response.headers.get("Retry-After")
            raw = await response.read()
            return response.status, orjson.loads(raw) if response.content_type == "application/json" else raw.decode()

    async def chat(self, *messages: dict[str, Any], **more: Any) -> tuple[int, Any]:
        """Ask for a turn of a whole conversation."""
        body = {"model": "m", "messages": list(messages)} | more
        return await self.post(f"/sessions/{self.session_id}/v1/chat/completions", body)

    async def say(self, text: str) -> str:
        """Say something, with all that was said before; the model's words."""
        self.history.append({"role": "user", "content": text})
        status, answer = await self.chat(*self.history)
        assert status == 200, answer
        self.history.append(answer["choices"][0]["message"])
        words: str = self.history[-1]["content"]
        return words

    async def end(self, **body: Any) -> tuple[int, Any]:
        """End the session."""
        return await self.post(f"/sessions/{self.session_id}/end", body)


class Site:
    """All of it."""

    def __init__(self, made: Stage, engine: FakeSGLang, url: str, http: aiohttp.ClientSession) -> None:
        self.stage = made
        self.engine = engine
        self.url = url
        self.http = http

    @property
    def figures(self) -> dict[str, Any]:
        """What `status` tells of sessions."""
        told: dict[str, Any] = self.stage.service.status()["sessions"]
        return told

    def client(self) -> Client:
        """Someone with the service's token, where there is one."""
        return Client(self.http, self.url, self.stage.service.config.service.token)

    async def until(self, **figures: int) -> None:
        """Wait until `status` tells these; nobody rings for them, so it looks again and again."""
        for _ in range(2000):
            told = self.figures
            if all(told[name] == number for name, number in figures.items()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"not {figures}: {self.figures}")

    async def until_at(self, *places: str) -> dict[str, Any]:
        """Wait until `stuck` finds its samples at these places, and return what it tells.

        A turn is under way as soon as it is asked for: it is at the gate, or at an engine, a turn of the loop later.
        """
        for _ in range(2000):
            told: dict[str, Any] = self.stage.service.stuck(0)
            if sorted(sample["at"] for sample in told["samples"]) == sorted(places):
                return told
            await asyncio.sleep(0.005)
        raise AssertionError(f"not at {places}: {told['samples']}")

    async def taken(self) -> Client:
        """Someone who took a session."""
        client = self.client()
        await client.take()
        return client


@asynccontextmanager
async def session_site(pushed: int = 1, agent: dict[str, Any] | None = None, **sections: Any) -> AsyncIterator[Site]:
    """Serve a stage of one engine and one task, whose prompts ask `hi`."""
    settings: dict[str, Any] = {
        "agent": {"path": SESSION} | (agent or {}),
        "tokenizer": {"path": "bytes", "chat_template": TEMPLATE},
        **sections,
    }
    async with (
        FakeSGLang(weight_version="0", report_spans=True) as engine,
        stage(engine, ready=False, **settings) as made,
        serve_http(made.service) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await made.push([{"id": f"p{n}", "messages": [QUESTION], "ground_truth": n} for n in range(pushed)])
        await made.service.ready()
        yield Site(made, engine, url, http)
