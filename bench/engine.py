"""Throughput of the built-in engine: `python -m bench.engine`.

Case `64over1`: tokens a second through HTTP with 64 requests running, over the same with one. The engine is a process
of its own, the client another, as in use; rounds of the two alternate, and the medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Final

import aiohttp
import orjson

from bench.report import Point, print_report, progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOUND: Final = 8.0
RUNNING: Final = 64
ROUNDS: Final = 7
MIN_ROUNDS: Final = 5
PROMPT_TOKENS: Final = 16
NEW_TOKENS: Final = 128
SINGLES_A_ROUND: Final = 8
"""Requests sent one after another for one reading of the single rate: long enough to average over a stray wake-up."""

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0


@asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[str]:
    """Run an engine process, and yield its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_svc.embedded",
        "--port",
        "0",
        "--die-with-parent",
        *flags,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        if "url=" not in line:
            raise RuntimeError(f"the engine did not start: {line!r}")
        yield line.split("url=", 1)[1].strip()
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()


async def generate(session: aiohttp.ClientSession, url: str, seed: int) -> int:
    """Run one request to its full length, and return its number of tokens."""
    body = orjson.dumps(
        {
            "input_ids": [(seed + place) % 256 for place in range(PROMPT_TOKENS)],
            "sampling_params": {"max_new_tokens": NEW_TOKENS, "sampling_seed": seed, "ignore_eos": True},
            "return_logprob": True,
        }
    )
    async with session.post(f"{url}/generate", data=body) as response:
        answer = orjson.loads(await response.read())
        if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != NEW_TOKENS:
            raise RuntimeError(f"the engine answered {response.status}: {answer}")
    return len(answer["output_ids"])


async def rate(session: aiohttp.ClientSession, url: str, *, running: int, waves: int) -> float:
    """Measure tokens a second with so many requests at once, several times over."""
    began = time.perf_counter()
    tokens = 0
    for wave in range(waves):
        seeds = range(wave * running, (wave + 1) * running)
        tokens += sum(await asyncio.gather(*(generate(session, url, seed) for seed in seeds)))
    return tokens / (time.perf_counter() - began)


async def measure(rounds: int) -> Point:
    """Measure the case."""
    connector = aiohttp.TCPConnector(limit=RUNNING)
    async with (
        engine_process("--max-running", str(RUNNING)) as url,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await rate(session, url, running=RUNNING, waves=1)  # connections and kernels warm
        many: list[float] = []
        one: list[float] = []
        for turn in range(rounds):
            one.append(await rate(session, url, running=1, waves=SINGLES_A_ROUND))
            many.append(await rate(session, url, running=RUNNING, waves=2))
            progress(f"round {turn + 1}/{rounds}: {many[-1]:,.0f} tokens/s with {RUNNING}, {one[-1]:,.0f} with 1")
    return Point("64over1", median(many), median(one), BOUND, "higher")


def main() -> int:
    """Run the bench; the exit code says whether the bound is kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="readings of each rate")
    rounds = max(MIN_ROUNDS, parser.parse_args().rounds)
    return 0 if print_report("engine", [asyncio.run(measure(rounds))]) else 1


if __name__ == "__main__":
    sys.exit(main())
