"""The bare client, in vLLM's words."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.support.client import Answer, Client

if TYPE_CHECKING:
    from tests.support.fake_vllm import FakeVLLM

__all__ = ["VLLMClient", "VLLMStream", "outcome"]


def outcome(answer: Answer) -> tuple[int, Any, int, Any]:
    """Status, finish reason, number of ids and weight versions of an answer."""
    status, body = answer
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    return status, choice["finish_reason"], len(choice["token_ids"]), choice["weight_versions"]


class VLLMStream:
    """One streamed generation, read in the background."""

    def __init__(self, client: VLLMClient, body: dict[str, Any]) -> None:
        self.chunks: list[Any] = []
        self.changed = asyncio.Event()
        self.task = client.start(self._read(client, body))

    async def _read(self, client: VLLMClient, body: dict[str, Any]) -> Answer:
        async with client.session.post(client.url + "/inference/v1/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    text = line[6:].strip().decode()
                    self.chunks.append(json.loads(text) if text.startswith("{") else text)
                    self.changed.set()
            return response.status, self.chunks

    async def wait_chunks(self, count: int) -> None:
        """Wait until that many were read since the start."""
        async with asyncio.timeout(10):
            while len(self.chunks) < count:
                self.changed.clear()
                await self.changed.wait()

    async def events(self) -> list[Any]:
        """All events, once the stream has ended."""
        await self.task
        return list(self.chunks)


class VLLMClient(Client):
    """A session against one engine."""

    def __init__(self, engine: FakeVLLM, key: str | None = None) -> None:
        super().__init__(engine, key)
        self.url = engine.url

    def request(self, rid: str, max_tokens: int = 128, **rest: Any) -> dict[str, Any]:
        """Make a request with a prompt of four tokens; `rest` goes to its top level."""
        sampling = {"max_tokens": max_tokens, "logprobs": 0}
        return {"request_id": rid, "token_ids": [10, 20, 30, 40], "sampling_params": sampling, **rest}

    def ask(self, rid: str, max_tokens: int = 128, **rest: Any) -> asyncio.Task[Answer]:
        """Ask for a generation."""
        return self.post("/inference/v1/generate", self.request(rid, max_tokens, **rest))

    def ask_stream(self, rid: str, max_tokens: int = 128, **rest: Any) -> VLLMStream:
        """Ask for the same as a stream."""
        return VLLMStream(self, self.request(rid, max_tokens, stream=True, **rest))

    def abort_ids(self, *ids: str) -> asyncio.Task[Answer]:
        """Abort by the engine's ids, by the development mode's route."""
        return self.post("/abort_requests", {"request_ids": list(ids)})

    def freeze(self, query: str = "mode=keep") -> asyncio.Task[Answer]:
        """Pause."""
        return self.post(f"/pause?{query}", None)

    def thaw(self) -> asyncio.Task[Answer]:
        """Go on."""
        return self.post("/resume", None)

    async def gauges(self) -> tuple[float, float]:
        """Running and waiting, as `/metrics` tells them."""
        _, text = await self.get("/metrics")
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_") and "reason" not in line]
        running, waiting = (float(line.rsplit(" ", 1)[1]) for line in lines)
        return running, waiting
