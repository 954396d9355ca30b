"""Agents that live elsewhere: each takes a session and speaks OpenAI's API to it, a turn at a time, all together."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import aiohttp
import orjson

__all__ = ["Agents"]

ASKED = b'{"role":"user","content":"Go on, what do you make of all of this?"}'
_CLAIM_S = 60.0
_HEADERS = {"Content-Type": "application/json"}


class _Agent:
    """One conversation; its messages are kept as they are sent."""

    __slots__ = ("headers", "messages", "url")

    def __init__(self, session: dict[str, Any]) -> None:
        self.url = str(session["base_url"])
        self.headers = {**_HEADERS, "Authorization": f"Bearer {session['api_key']}"}
        self.messages = [ASKED]


class Agents:
    """So many agents of one task.

    Args:
        url: the service.
        task: whose samples they take.
        count: how many.
    """

    def __init__(self, url: str, task: str, count: int) -> None:
        self._url = url
        self._task = task
        self._count = count
        self._agents: list[_Agent] = []
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        body = {"task": self._task, "wait_s": _CLAIM_S}
        claimed = await asyncio.gather(*(self._post(f"{self._url}/sessions", body) for _ in range(self._count)))
        self._agents = [_Agent(session) for session in claimed]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def warm(self) -> None:
        """Use every connection once."""
        await asyncio.gather(*(self._get(f"{agent.url}/models", agent.headers) for agent in self._agents))

    async def turn(self) -> int:
        """Have each of them make one turn; returns the prompt tokens of one of them."""
        return max(await asyncio.gather(*map(self._one, self._agents)))

    async def leave(self) -> None:
        """End the sessions: their samples go to their judger."""
        ends = (agent.url.removesuffix("/v1") + "/end" for agent in self._agents)
        keys = (agent.headers for agent in self._agents)
        await asyncio.gather(*(self._post(url, {}, headers) for url, headers in zip(ends, keys, strict=True)))

    async def _one(self, agent: _Agent) -> int:
        body = b'{"model":"policy","messages":[%b]}' % b",".join(agent.messages)
        answer = await self._post(f"{agent.url}/chat/completions", body, agent.headers)
        agent.messages += [orjson.dumps(answer["choices"][0]["message"]), ASKED]
        return int(answer["usage"]["prompt_tokens"])

    async def _post(self, url: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self._session.post(url, data=data, headers=headers or _HEADERS) as response:
            return await _read(response)

    async def _get(self, url: str, headers: dict[str, str]) -> Any:
        async with self._session.get(url, headers=headers) as response:
            return await _read(response)

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("use it in an async with statement")
        return self._http


async def _read(response: aiohttp.ClientResponse) -> Any:
    raw = await response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.url}: {response.status}: {raw[:500]!r}")
    return orjson.loads(raw)
