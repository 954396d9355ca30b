"""A small model, a scheduler that steps when told, and a served engine with its client."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from rollout_svc.embedded.engine import Engine
from rollout_svc.embedded.job import Job, Outcome
from rollout_svc.embedded.model import TinyConfig, TinyTransformer, build, preset
from rollout_svc.embedded.sampling import Sampling
from rollout_svc.embedded.scheduler import Scheduler
from rollout_svc.embedded.server import EngineServer, Identity
from rollout_svc.embedded.tokens import ByteVocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from rollout_svc.embedded.auth import Keys
    from rollout_svc.embedded.script import Script

VOCABULARY = ByteVocabulary()
CONFIG = TinyConfig(vocab_size=VOCABULARY.size, context=256)
MOE_CONFIG = preset("tiny-moe", vocab_size=VOCABULARY.size, context=256)
PATIENCE_S = 20.0

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


def small_model(seed: int = 0) -> TinyTransformer:
    """A byte model with a context of 256."""
    return build(CONFIG, seed)


def moe_model(seed: int = 0) -> TinyTransformer:
    """The same with experts, and sure enough of itself that another routing shows in what it says."""
    model = build(MOE_CONFIG, seed)
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model


def job(rid: str, prompt: Iterable[int] = (1, 2, 3), limit: int = 16, **sampling: Any) -> Job:
    """A job that stops at its limit, unless told otherwise."""
    settings = Sampling(**{"seed": 0, "ignore_eos": True} | sampling)
    stop_ids = settings.stop_token_ids | (frozenset() if settings.ignore_eos else {VOCABULARY.end_id})
    return Job(rid=rid, prompt=list(prompt), sampling=settings, limit=limit, stop_ids=frozenset(stop_ids))


def run_to_end(scheduler: Scheduler, jobs: Iterable[Job] = ()) -> dict[str, Outcome]:
    """Submit jobs, step until nothing is left, and return the outcomes by id."""
    with torch.inference_mode():
        for one in jobs:
            scheduler.submit(one)
        while scheduler.busy:
            scheduler.step()
        return {outcome.job.rid: outcome for outcome in scheduler.take_ended()}


def plain_logprobs(model: TinyTransformer, done: Job, routing: torch.Tensor | None = None) -> list[float]:
    """The log-probabilities of a job's output by one plain forward pass over the whole sequence.

    With a routing, int[tokens - 1, moe_layers, top_k], that is replayed.
    """
    with torch.inference_mode():
        rows = None if routing is None else torch.cat([routing, -torch.ones_like(routing[:1])])[None].long()
        logprobs = torch.log_softmax(model(torch.tensor([done.prompt + done.ids]), rows)[0], dim=-1)
        chosen = logprobs[len(done.prompt) - 1 : -1].gather(1, torch.tensor(done.ids)[:, None])
        return [float(value) for value in chosen.squeeze(1)]


def uninterrupted_ids(limit: int) -> list[int]:
    """The tokens of the request that `Served.generate` sends, run alone and to its end."""
    scheduler = Scheduler(small_model(), VOCABULARY, max_running=1)
    return run_to_end(scheduler, [job("alone", limit=limit)])["alone"].job.ids


def write_tokenizer(directory: Path, **words: int) -> None:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(directory / "tokenizer.json"))


class GatedScheduler(Scheduler):
    """Takes a step only when permitted; commands are served meanwhile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self._permits = threading.Semaphore(0)
        self._open = False

    def permit(self, steps: int) -> None:
        """Allow so many more steps."""
        self._permits.release(steps)

    def open(self) -> None:
        """Allow all steps from now on."""
        self._open = True

    def step(self) -> None:
        if self._open or self._permits.acquire(timeout=0.0005):
            super().step()
            self.steps += 1


class Served:
    """An engine on a socket, and a session to talk to it."""

    def __init__(self, server: EngineServer, scheduler: GatedScheduler, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.engine: Engine = server.engine
        self.scheduler = scheduler
        self.session = session

    async def call(self, path: str, body: Any = None, method: str = "POST", **kwargs: Any) -> tuple[int, Any]:
        """Call a route; returns the status and the body, decoded when it is JSON."""
        async with self.session.request(method, path, json=body, **kwargs) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    def generate(self, rid: str, limit: int = 16, **sampling: Any) -> asyncio.Task[tuple[int, Any]]:
        """Start a generate call in a task."""
        settings = {"max_new_tokens": limit, "sampling_seed": 0, "ignore_eos": True} | sampling
        body = {"rid": rid, "input_ids": [1, 2, 3], "sampling_params": settings, "return_logprob": True}
        return asyncio.get_running_loop().create_task(self.call("/generate", body), name=f"generate:{rid}")

    async def until(self, reached: Callable[[], bool]) -> None:
        """Go through the engine's thread until a condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                await self.engine.thread.call(lambda: None)

    async def step(self, steps: int = 1) -> None:
        """Have the scheduler take so many steps, and wait until it has."""
        target = self.scheduler.steps + steps
        self.scheduler.permit(steps)
        await self.until(lambda: self.scheduler.steps >= target)

    async def queued(self, count: int) -> None:
        """Wait until so many requests are in the scheduler, running or waiting."""
        scheduler = self.scheduler
        await self.until(lambda: len(scheduler.batch.jobs) + len(scheduler.waiting) == count)

    def assert_idle(self) -> None:
        """Nothing is left anywhere: no request, no row, no waiter."""
        assert not self.scheduler.busy
        assert self.scheduler.batch.free == self.scheduler.batch.rows
        assert self.engine.door.inside == 0
        assert self.engine.door.waiting == 0
        assert self.engine.waiting == 0
        assert self.engine.thread.pending == 0


@asynccontextmanager
async def served(
    *,
    max_running: int = 8,
    is_open: bool = False,
    keys: Keys | None = None,
    config: TinyConfig = CONFIG,
    tells_experts: bool = False,
    script: Script | None = None,
) -> AsyncIterator[Served]:
    """Serve an engine on a socket of its own."""
    scheduler = GatedScheduler(build(config, 0), VOCABULARY, max_running=max_running)
    if is_open:
        scheduler.open()
    engine = Engine(scheduler)
    identity = Identity("tiny", "bytes", config, max_running, 0, tells_experts)
    server = EngineServer(engine, VOCABULARY, identity, keys, script)
    url = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(url) as session:
            yield Served(server, scheduler, session)
    finally:
        await server.close()
