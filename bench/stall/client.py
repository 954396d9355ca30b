"""`python -m bench.stall.client`: one loop with 512 small requests, and big answers read in one of four ways.

Plays the rounds, in each of them every way by turns, and prints a line of JSON for each: the lag of the loop, bytes of
big answers a second, small answers a second.

- The loop, the transport and the small requests are the same whatever the way: only who reads the big answers differs.
- `lift` is the service's transport; `read` and `discard` are a bare client of the library under it, `none` reads none.
- Lag is looked at every millisecond, by due times that do not wait for a late look: a loop that stands still for 100 ms
  is late by 100, 99, … 1.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from bench.bare import PROMPT_TOKENS, WIRES
from bench.stall.bodies import ENCODINGS, KEY
from rollout_svc.engines import Call, Endpoint, HttpTransport
from rollout_svc.engines.calls import Lift
from rollout_svc.loop import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WAYS", "late"]

SMALL: Final = 512
BIG: Final = 2
"""Big answers under way at once: one is decoded while another comes."""
TICK_S: Final = 0.001
SETTLE_S: Final = 0.5
"""Seconds under load before anything is counted."""
MAX_BYTES: Final = 1 << 30
WAYS: Final = ("none", "discard-base64", "read-base64", "lift-base64", "discard-nested", "lift-nested")
"""Who reads, and what: in the order of a round."""
WARM_S: Final = 1.0


class Client:
    """Both kinds of requests, counted."""

    def __init__(self, transport: HttpTransport, bare: aiohttp.ClientSession, small: str, big: str) -> None:
        self.transport = transport
        self.bare = bare
        self.small = Endpoint(small, None, None)
        self.big = Endpoint(big, None, None)
        self.small_done = 0
        self.big_bytes = 0
        self.stopped = False
        self.sizes: dict[str, int] = {}

    async def keep_small(self) -> None:
        """Send a small request, read its answer, and again."""
        wire = WIRES["sglang"]
        ids = list(range(PROMPT_TOKENS))
        while True:
            call = Call("POST", f"/{wire.path}", wire.request(ids, uuid.uuid4().hex))
            reply = await self.transport.data(self.small, call)
            wire.read(orjson.loads(reply.body))
            self.small_done += 1

    async def keep_big(self, way: str, encoding: str) -> None:
        """Read a big answer, and again, until told to stop: none is cut off."""
        while not self.stopped:
            if way == "lift":
                await self._lift(encoding)
                continue
            async with self.bare.post(self.big.at(f"/{encoding}"), data=b"{}") as response:
                if way == "read":
                    await response.read()
                    self.big_bytes += response.content_length or 0
                    continue
                async for data in response.content.iter_any():
                    self.big_bytes += len(data)

    async def _lift(self, encoding: str) -> None:
        lift = Lift(KEY, "base64" if encoding == "base64" else "numbers", MAX_BYTES)
        reply = await self.transport.data(self.big, Call("POST", f"/{encoding}", b"{}", lift=lift))
        if reply.lifted is None or len(reply.body) > MAX_BYTES // 1024:
            raise RuntimeError("nothing was lifted")
        self.big_bytes += self.sizes[encoding]

    async def warm(self, encoding: str) -> None:
        """Read one big answer, to know its size."""
        async with self.bare.post(self.big.at(f"/{encoding}"), data=b"{}") as response:
            self.sizes[encoding] = len(await response.read())


def late(due: float, now: float) -> tuple[list[float], float]:
    """How late each look is that was due until now, and when the next one is due; seconds."""
    found = []
    while due <= now:
        found.append(now - due)
        due += TICK_S
    return found, due


async def lags(seconds: float) -> list[float]:
    """How late the loop was at each millisecond of that time, in seconds, sorted."""
    found: list[float] = []
    due = time.perf_counter() + TICK_S
    end = due + seconds
    while due < end:
        await asyncio.sleep(due - time.perf_counter())
        some, due = late(due, time.perf_counter())
        found += some
    return sorted(found)


async def measure(client: Client, kind: str, seconds: float) -> dict[str, Any]:
    """One way of a round: big answers are under way from before its beginning to its end."""
    client.stopped = False
    way, _, encoding = kind.partition("-")
    big = BIG if encoding else 0
    tasks = [asyncio.create_task(client.keep_big(way, encoding), name=f"big:{number}") for number in range(big)]
    await asyncio.sleep(SETTLE_S)
    start, small, before = time.perf_counter(), client.small_done, client.big_bytes
    found = await lags(seconds)
    elapsed_s = time.perf_counter() - start
    result = {
        "way": kind,
        "lag_p999_ms": 1000 * found[int(len(found) * 0.999)],
        "lag_p50_ms": 1000 * found[len(found) // 2],
        "lag_max_ms": 1000 * found[-1],
        "big_per_s": (client.big_bytes - before) / elapsed_s,
        "small_per_s": (client.small_done - small) / elapsed_s,
    }
    client.stopped = True
    await asyncio.gather(*tasks)
    return result


async def run(small: str, big: str, ways: Sequence[str], rounds: int, seconds: float) -> None:
    """Play the rounds."""
    async with (
        HttpTransport() as transport,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as bare,
        asyncio.TaskGroup() as tasks,
    ):
        client = Client(transport, bare, small, big)
        for encoding in ENCODINGS:
            await client.warm(encoding)
        kept = []
        for number in range(SMALL):
            kept.append(tasks.create_task(client.keep_small(), name=f"small:{number}"))
            if number % 64 == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(WARM_S)
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for way in ways:
                print(orjson.dumps(await measure(client, way, seconds)).decode(), flush=True)
        for task in kept:
            task.cancel()


def main() -> None:
    """Play the rounds and print a line for each measurement."""
    parser = argparse.ArgumentParser(prog="bench.stall.client", description=__doc__)
    parser.add_argument("--small", required=True, help="the canned engine")
    parser.add_argument("--big", required=True, help="the engine of big answers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(options.small, options.big, options.ways, options.rounds, options.seconds))


if __name__ == "__main__":
    main()
