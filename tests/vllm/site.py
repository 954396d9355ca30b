"""The service over the real engine: how its worker is written down, and how far the engine has got.

- Everything goes through real HTTP; nobody but the service and the test talks to the engine.
- The engine is another process: a test looks at its counters again and again, for it rings no bell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from rollout_svc.pause.report import PauseReport
from tests.support.stage import Stage, lines, stage
from tests.vllm.server import API_KEY, SLOTS, Server

__all__ = [
    "WAIT_S",
    "answers",
    "generated",
    "look",
    "met_half_done",
    "prompt_ids",
    "settled",
    "sole",
    "spans",
    "vllm_stage",
]

WAIT_S: Final = 60.0
"""What the engine does takes seconds; on cores that others use, many."""
DEADLINE_S: Final = 20.0
"""Of a pause: on two cores an abort posted into a burst has waited four seconds for its turn."""
LOOK_S: Final = 0.02
TRIES: Final = 5


@asynccontextmanager
async def vllm_stage(
    server: Server,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    in_flight: int = SLOTS,
    stream: bool = False,
    sampling: dict[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Stage]:
    """Run a service over the engine.

    Args:
        server: the engine.
        max_tokens: of one answer; ends of text are ignored, so that it is that long.
        temperature: 0 is greedy.
        in_flight: requests the service sends at once; beyond `SLOTS` they wait in the engine's queue.
        stream: receive tokens as they are made.
        sampling: more of it.
        sections: see `tests.support.stage.make_config`.
    """
    worker = {"url": server.url, "dialect": "vllm", "api_key": API_KEY, "max_batch": in_flight, "stream": stream}
    settings = {"max_tokens": max_tokens, "temperature": temperature, "extra": {"ignore_eos": True}}
    trainer = {"train_batch_size": in_flight, "allow_over_concurrency_ratio": 1.0}
    pause = {"deadline_s": DEADLINE_S}
    async with stage(
        worker | sections.pop("worker", {}),
        sampling=settings | (sampling or {}),
        trainer=trainer | sections.pop("trainer", {}),
        pause=pause | sections.pop("pause", {}),
        start_timeout_s=WAIT_S,
        **sections,
    ) as made:
        yield made


def prompt_ids(number: int) -> list[int]:
    """The tokens of the prompt `p<number>`."""
    ids: list[int] = lines(1, number)[0]["input_ids"]
    return ids


async def answers(made: Stage, groups: int = 1, step: int = 0) -> list[dict[str, Any]]:
    """Take so many groups of one sample, for good; the samples, in the order of their prompts."""
    batch = await made.take(step, groups, WAIT_S)
    await made.service.ack(batch["batch_id"])
    found = sorted(batch["groups"], key=lambda group: int(group["prompt"]["id"][1:]))
    return [sample for group in found for sample in group["samples"]]


async def met_half_done(
    made: Stage, server: Server, tokens: int, half_done: Callable[[], bool], **pause: Any
) -> tuple[int, PauseReport]:
    """Push one prompt after the other until a pause met its answer half done; the prompt's number, and the report.

    A server without a core to itself can be seconds late with what it has: an answer may be whole when the pause comes.

    Args:
        made: the service; nothing else is under way.
        server: the engine.
        tokens: how many it has made, at the least, when the pause begins.
        half_done: asked after the pause.
        pause: how to pause.
    """
    for number in range(TRIES):
        async with generated(server, tokens):
            await made.push(1, number)
        report = await made.pause(**pause)
        assert report.clean
        if half_done():
            return number, report
        await made.resume()
        await answers(made)
    raise AssertionError(f"{TRIES} answers were whole before they could be stopped")


def sole(made: Stage) -> Any:
    """The one sample there is, wherever it is."""
    [group] = made.live_groups()
    [sample] = group.samples
    return sample


def spans(sample: dict[str, Any]) -> list[tuple[int | None, int, int]]:
    """Which weights made which tokens."""
    return [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]


async def look(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Look at the engine again and again, in a thread, until it holds."""
    end = time.monotonic() + timeout_s
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def generated(server: Server, tokens: int) -> AsyncIterator[None]:
    """At the end of the block, wait until the engine has made so many tokens since its beginning."""
    before = await asyncio.to_thread(server.metric, "generation_tokens_total")
    yield
    await look(lambda: server.metric("generation_tokens_total") >= before + tokens, f"{tokens} tokens are generated")


async def settled(server: Server) -> None:
    """Wait until the engine's own gauges say that nothing runs or waits there; they lag by a step."""
    await look(lambda: server.load() == (0, 0), "the engine is idle")
