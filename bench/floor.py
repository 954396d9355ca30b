"""The floor: a bare aiohttp + orjson client that builds the same requests and parses the same answers.

`python -m bench.floor --url U --in-flight N --total M` prints one JSON line: CPU per request of that process, in
milliseconds, over M requests of a rolling window of N, once every connection is open and used.
`--abort-and-read N` instead times one `abort_all` with N held requests, from its POST to the last parsed answer.

- Nothing is done here that a client could leave out: no retry, no timer, no log, no check but the lengths.
- The same counting serves a bench of ours: CPU is read when a request is done, and every request is counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson
from yarl import URL

from bench.bare import PROMPT_TOKENS, WIRES
from bench.process import raise_open_files

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Floor", "abort_and_read", "fill", "keep", "measure"]

VOCAB = 32000
"""Prompt ids are below this."""
OPEN_AT_ONCE = 64
"""Connections opened together; then the loop gets a turn. Thousands at once would block it for seconds."""
WARM_ROUNDS = 2
"""Requests that every connection has carried before the measurement begins."""
POLL_S = 0.02
"""How often the engine is asked whether all held requests have arrived, in seconds."""
FILL_POLL_S = 0.005
"""The same where that time is what is measured, in seconds."""
_HEADERS = {"Content-Type": "application/json"}


class Floor:
    """A bare client of one engine.

    Args:
        url: the engine's base address.
        dialect: what it speaks.
        lengths: of its prompts, in turn, in tokens.
        vocab: their ids are below this.
    """

    def __init__(
        self, url: str, dialect: str = "sglang", lengths: Sequence[int] = (PROMPT_TOKENS,), vocab: int = VOCAB
    ) -> None:
        self._base = URL(url)
        self._wire = WIRES[dialect]
        self._generate_url = self._base / self._wire.path
        rng = random.Random(0)
        self._prompts = [[rng.randrange(vocab) for _ in range(lengths[n % len(lengths)])] for n in range(64)]
        self._session: aiohttp.ClientSession | None = None
        self.done = 0
        self.tokens = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The one session."""
        if self._session is None:
            raise RuntimeError("use it in an async with statement")
        return self._session

    async def generate(self) -> tuple[list[int], list[float]]:
        """Send one request; return its ids and their logprobs."""
        body = self._wire.request(self._prompts[self.done % len(self._prompts)], uuid.uuid4().hex)
        async with self.session.post(self._generate_url, data=body, headers=_HEADERS) as response:
            raw = await response.read()
        ids, logprobs = self._wire.read(orjson.loads(raw))
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids, {len(logprobs)} logprobs")
        self.done += 1
        self.tokens += len(ids)
        return ids, logprobs

    async def control(self, method: str, path: str, body: Any = None) -> Any:
        """Call a control route; return the decoded answer, or None for an empty one."""
        data = None if body is None else orjson.dumps(body)
        async with self.session.request(method, self._base / path, data=data, headers=_HEADERS) as response:
            raw = await response.read()
        return orjson.loads(raw) if raw.startswith(b"{") else None


async def _paced(tasks: Sequence[object]) -> None:
    """Let the loop turn after every few tasks that will open a connection."""
    if len(tasks) % OPEN_AT_ONCE == 0:
        await asyncio.sleep(0.01)


class _Window:
    """The measured stretch: from the moment every connection is open and warm, for `total` requests."""

    def __init__(self, floor: Floor, in_flight: int, total: int) -> None:
        self._floor = floor
        self._in_flight = in_flight
        self._total = total
        self._end_at: int | None = None
        self.used = 0  # connections that have carried a request
        self.closed = False
        self.cpu_s = 0.0
        self.wall_s = 0.0

    def tick(self) -> None:
        """Count: a request is done."""
        done = self._floor.done
        if self._end_at is None:
            if self.used == self._in_flight and done >= WARM_ROUNDS * self._in_flight:
                self._end_at = done + self._total
                self.cpu_s, self.wall_s = -time.process_time(), -time.perf_counter()
        elif done == self._end_at:
            self.cpu_s += time.process_time()
            self.wall_s += time.perf_counter()
            self.closed = True


async def measure(
    url: str,
    in_flight: int,
    total: int,
    dialect: str = "sglang",
    lengths: Sequence[int] = (PROMPT_TOKENS,),
    vocab: int = VOCAB,
) -> dict[str, Any]:
    """Measure CPU per request at `in_flight` requests, over `total` of them, warm; further arguments as `Floor`.

    Returns:
        `in_flight`, `total`, `cpu_ms_per_request`, `wall_s`, `requests_per_s`.
    """
    async with Floor(url, dialect, lengths, vocab) as floor:
        window = _Window(floor, in_flight, total)

        async def keep_one_in_flight() -> None:
            await floor.generate()
            window.used += 1
            while not window.closed:
                await floor.generate()
                window.tick()

        tasks: list[asyncio.Task[None]] = []
        for index in range(in_flight):
            tasks.append(asyncio.create_task(keep_one_in_flight(), name=f"floor:{index}"))
            await _paced(tasks)
        await asyncio.gather(*tasks)
    return {
        "in_flight": in_flight,
        "total": total,
        "cpu_ms_per_request": 1000 * window.cpu_s / total,
        "wall_s": window.wall_s,
        "requests_per_s": total / window.wall_s,
    }


async def abort_and_read(url: str, count: int) -> float:
    """Time an abort of `count` held requests, from its POST to the last parsed answer, in seconds.

    The engine must hold generations until they are aborted. The abort goes over a warm connection of its own, once
    the engine counts all of them as running.
    """
    async with Floor(url) as floor:
        await _abort_and_read_once(floor, count)  # opens the connections
        return await _abort_and_read_once(floor, count)


async def _abort_and_read_once(floor: Floor, count: int) -> float:
    tasks: list[asyncio.Task[Any]] = []
    for index in range(count):
        tasks.append(asyncio.create_task(floor.generate(), name=f"held:{index}"))
        await _paced(tasks)
    while (await floor.control("GET", "v1/loads"))["loads"][0]["num_running_reqs"] < count:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)  # another process: it sends no event
    start = time.perf_counter()
    await floor.control("POST", "abort_request", {"abort_all": True})
    await asyncio.gather(*tasks)
    return time.perf_counter() - start


async def fill(url: str, count: int) -> float:
    """Time from the first of `count` requests, over connections still to be opened, until the engine runs them all.

    The engine must hold generations, and be asked by nobody else.
    """
    async with Floor(url) as floor:
        start = time.perf_counter()
        tasks: list[asyncio.Task[Any]] = []
        for index in range(count):
            tasks.append(asyncio.create_task(floor.generate(), name=f"held:{index}"))
            if len(tasks) % OPEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        while (await floor.control("GET", "busy"))["running"] < count:  # noqa: ASYNC110
            await asyncio.sleep(FILL_POLL_S)  # as below
        elapsed_s = time.perf_counter() - start
        await floor.control("POST", "abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)
        return elapsed_s


async def keep(urls: Sequence[str], in_flight: int) -> None:
    """Keep `in_flight` requests at each of these engines, until cancelled."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        opened: list[asyncio.Task[None]] = []
        for url in urls:
            floor = await stack.enter_async_context(Floor(url))
            for index in range(in_flight):
                opened.append(tasks.create_task(_for_ever(floor), name=f"keep:{url}:{index}"))
                await _paced(opened)


async def _for_ever(floor: Floor) -> None:
    while True:
        await floor.generate()


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    url = args.url[0]
    if args.keep:
        await keep(args.url, args.keep)
    if args.abort_and_read:
        elapsed_s = await abort_and_read(url, args.abort_and_read)
        return {"count": args.abort_and_read, "elapsed_s": elapsed_s}
    if args.fill:
        return {"count": args.fill, "elapsed_s": await fill(url, args.fill)}
    return await measure(url, args.in_flight, args.total, args.dialect, args.prompt_tokens, args.vocab)


def main() -> None:
    """Measure once and print one JSON line."""
    parser = argparse.ArgumentParser(prog="bench.floor", description="The bare client that others are compared with.")
    parser.add_argument("--url", required=True, nargs="+", help="one, or several to keep busy")
    parser.add_argument("--dialect", choices=WIRES, default="sglang")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--total", type=int, default=6400)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[PROMPT_TOKENS], help="lengths, in turn")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="prompt ids are below this")
    parser.add_argument("--abort-and-read", type=int, default=0, metavar="N", help="time an abort of N held requests")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="keep N requests at each, until ended")
    parser.add_argument("--fill", type=int, default=0, metavar="N", help="time until N requests are held")
    raise_open_files()
    print(orjson.dumps(asyncio.run(_run(parser.parse_args()))).decode(), flush=True)


if __name__ == "__main__":
    main()
