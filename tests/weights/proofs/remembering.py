"""An engine with a prefix cache, as real ones have: what was computed of a prompt is read again by the next one.

It forgets when it is told to, and only then: by `POST /flush_cache`, and by an update from disk that says so. A new
label, or weights that are swapped, change nothing of what it remembers. One that is `deaf` does as if it had forgotten.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
from aiohttp import web

from rollout_svc.embedded.batch import Batch
from rollout_svc.embedded.decode import MIN_ROWS
from rollout_svc.embedded.engine import Engine
from rollout_svc.embedded.model import TinyConfig, TinyTransformer, build
from rollout_svc.embedded.sampling import SamplingRows, sample
from rollout_svc.embedded.server import EngineServer, Identity
from tests.embedded.helpers import VOCABULARY, GatedScheduler, Served

if TYPE_CHECKING:
    from rollout_svc.embedded.job import Job


class RememberingBatch(Batch):
    """One row, and the keys and values of what stood in it before.

    Attributes:
        hits: prompt tokens that were not computed, but read.
    """

    def __init__(self, model: TinyTransformer, *, deaf: bool) -> None:
        super().__init__(model, 1)
        self.hits = 0
        self._deaf = deaf
        self._remembered: list[tuple[list[int], list[torch.Tensor]]] = []

    def forget(self) -> None:
        """Drop all of it."""
        if not self._deaf:
            self._remembered.clear()

    def join(self, jobs: list[Job]) -> tuple[list[int], list[float]]:
        """Read what is remembered of the beginning, and compute the rest of it token by token."""
        [job] = jobs
        drawn = super().join(jobs)
        tokens = job.tokens
        shared, kept = max(((_common(known, tokens), kv) for known, kv in self._remembered), default=(0, []), key=_long)
        if not shared:
            return drawn
        self.hits += shared
        for now, old in zip(self._forward._kv, kept, strict=True):
            now[:, 0, :, :shared] = old[:, :, :shared]
        for place in range(shared, len(tokens)):
            spare = [0] * (MIN_ROWS - 1)
            ids, places = torch.tensor([tokens[place], *spare]), torch.tensor([place, *spare])
            logits, _ = self._forward.decode(ids, places, place)
        uniforms = self._uniforms[:1, len(tokens)]
        ids, logprobs = sample(logits[:1], SamplingRows.of([job.sampling], self._vocab_size), uniforms)
        return ids.tolist(), logprobs.tolist()

    def remove(self, rows: list[int]) -> None:
        """Remember what leaves, but for its last token, which was never computed."""
        for row in rows:
            self._remembered.append((self.jobs[row].tokens[:-1], [kv[:, row].clone() for kv in self._forward._kv]))
        super().remove(rows)


class RememberingServer(EngineServer):
    """Forgets when it is told to."""

    async def forget(self) -> None:
        """Between two steps."""
        batch = self.engine._scheduler.batch
        assert isinstance(batch, RememberingBatch)
        await self.engine.thread.call(batch.forget)

    async def _flush_cache(self, request: web.Request) -> web.Response:
        answer = await super()._flush_cache(request)
        if answer.status == web.HTTPOk.status_code:
            await self.forget()
        return answer

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        answer = await super()._update_weights_from_disk(request)
        if (await request.json()).get("flush_cache", True):
            await self.forget()
        return answer


@asynccontextmanager
async def remembering(*, config: TinyConfig, max_running: int = 1, deaf: bool = False) -> AsyncIterator[Served]:
    """Serve such an engine, open; it has one row."""
    scheduler = GatedScheduler(build(config, 0), VOCABULARY, max_running=1)
    scheduler.batch = RememberingBatch(scheduler.model, deaf=deaf)
    server = RememberingServer(Engine(scheduler), VOCABULARY, Identity("tiny", "bytes", config, max_running, 0))
    url = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(url) as session:
            yield Served(server, scheduler, session)
    finally:
        await server.close()


def _common(known: list[int], tokens: list[int]) -> int:
    """Tokens that two sequences begin with alike; of the second the last one has to be computed."""
    shared = 0
    for one, other in zip(known, tokens[:-1], strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _long(found: tuple[int, Any]) -> int:
    return found[0]
