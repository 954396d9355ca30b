"""A bare client for tests of the fakes: what came back, as it came back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Protocol, Self

import aiohttp

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Answer", "Client", "Stream", "outcome"]

Answer = tuple[int, Any]


class Addressed(Protocol):
    """Whatever listens somewhere."""

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""


def outcome(answer: Answer) -> tuple[int, Any, int]:
    """Status, finish reason and number of ids of a `/generate` answer."""
    status, body = answer
    return status, body["meta_info"]["finish_reason"], len(body["output_ids"])


class Stream:
    """One streamed generation, read in the background."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self.chunks: list[Any] = []
        self.changed = asyncio.Event()
        self.seen = 0
        self.task = client.start(self._read(client, body))

    async def _read(self, client: Client, body: dict[str, Any]) -> Answer:
        async with client.session.post(client.engine.url + "/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    text = line[6:].strip().decode()
                    self.chunks.append(json.loads(text) if text.startswith("{") else text)
                    self.changed.set()
            return response.status, self.chunks

    async def events(self) -> list[Any]:
        """All events, once the stream has ended."""
        _, chunks = await self.task
        return list(chunks)


class Client:
    """A session against one engine; every verb returns a task that ends with (status, decoded body or None)."""

    def __init__(self, engine: Addressed, key: str | None = None) -> None:
        self.engine = engine
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()

    def start(self, coroutine: Any) -> asyncio.Task[Answer]:
        """Own a call; it is cancelled when the client closes."""
        task: asyncio.Task[Answer] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _call(self, method: str, path: str, body: Any) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        async with self.session.request(method, self.engine.url + path, data=data) as response:
            raw = await response.read()
            if response.content_type == "application/json":
                return response.status, json.loads(raw) if raw else None
            return response.status, raw.decode() or None

    def post(self, path: str, body: Any) -> asyncio.Task[Answer]:
        """Send a JSON body, or with None no body at all."""
        return self.start(self._call("POST", path, body))

    def get(self, path: str) -> asyncio.Task[Answer]:
        """Look at a route."""
        return self.start(self._call("GET", path, None))

    def generate(self, rid: str, max_new_tokens: int = 128) -> asyncio.Task[Answer]:
        """Ask for a generation with logprobs from a prompt of three tokens."""
        return self.post("/generate", self.body(rid, max_new_tokens))

    def stream(self, rid: str, max_new_tokens: int = 128) -> Stream:
        """Ask for the same as a stream."""
        return Stream(self, {**self.body(rid, max_new_tokens), "stream": True})

    def body(self, rid: str, max_new_tokens: int) -> dict[str, Any]:
        """The request of `generate`."""
        sampling = {"max_new_tokens": max_new_tokens}
        return {"rid": rid, "input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}

    async def wait_chunks(self, stream: Stream, more: int) -> None:
        """Wait until that many chunks more than last time were read."""
        stream.seen += more
        async with asyncio.timeout(10):
            while len(stream.chunks) < stream.seen:
                stream.changed.clear()
                await stream.changed.wait()

    def abort(self, rid: str) -> asyncio.Task[Answer]:
        """Abort by id."""
        return self.post("/abort_request", {"rid": rid})

    def pause(self, mode: str) -> asyncio.Task[Answer]:
        """Pause in that mode."""
        return self.post("/pause_generation", {"mode": mode})

    def resume(self) -> asyncio.Task[Answer]:
        """Continue."""
        return self.post("/continue_generation", {})
