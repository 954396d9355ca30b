"""An abort does not queue behind generation, measured against a bare client whose aborts have a loop of their own."""

from __future__ import annotations

import asyncio
import gc
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import aiohttp
import orjson
import pytest

from bench.floor import Floor
from bench.process import Child, raise_open_files
from rollout_svc.hosting import calm_collector
from tests.chaos.site import DEADLINE_S, run, site
from tests.chaos.turns import TurnMeter

FACTOR = 3.0
"""By how much ours may exceed the floor, in both figures."""
AT_ONCE_S = 0.01
"""Seconds: two of the interpreter's switch intervals. The floor's thread gets its turn at once (0.5 ms) or after one or
two (5-11 ms), as luck has it; an abort behind the answers that land takes a hundred."""
IN_FLIGHT = 4096
ROUNDS = 5
READ_FIRST = 256
"""Answers read before the abort is asked for: the others have landed, or are about to."""
OPEN_AT_ONCE = 64
CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: from asking for the abort to its arrival, and the longest turn of the loop that reads."""

    abort_s: float
    turn_s: float


class Burst:
    """The engine process, and a connection for commands that was there before its door was shut."""

    def __init__(self, expected: int) -> None:
        self._child = Child("tests.support.burst_engine", "--expected", expected)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._child)
        self.port = int(self._child.ready_line[0])
        self.url = f"http://127.0.0.1:{self.port}"
        self._commands = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        self._stack.callback(self._commands.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, method: str, path: str) -> Any:
        """Give a command; blocks."""
        self._commands.request(method, path)
        body = self._commands.getresponse().read()
        return orjson.loads(body) if body else None

    async def filled(self, count: int) -> None:
        """Wait until it holds so many generations, by its own count: another process sends no event."""
        while int(self.command("GET", "/v1/loads")["loads"][0]["num_running_reqs"]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def fill_the_door(self) -> None:
        """Let nobody in any more: the queue of those who wait to be accepted is full."""
        self.command("POST", "/shut")
        for _ in range(4):
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", self.port))
            self._stack.callback(waiting.close)

    def aborted_at(self) -> float:
        """When the first abort arrived."""
        return float(self.command("GET", "/marks")["aborted_at"][0])


@contextmanager
def _as_served() -> Iterator[None]:
    """Collect garbage as `serve` does, on both sides."""
    threshold = gc.get_threshold()
    gc.collect()
    calm_collector()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


async def _ours(engine: Burst, in_flight: int) -> Measured:
    async with site([engine.url], in_flight, alone=False) as made:
        worker = made.worker()
        await engine.filled(in_flight)
        engine.fill_the_door()
        meter = TurnMeter(asyncio.get_running_loop())
        read_before = worker.answered
        engine.command("POST", "/burst")
        meter.reset()
        await made.until(lambda: worker.answered >= read_before + READ_FIRST)
        asked = time.monotonic()
        report = await made.service.pause(deadline_s=DEADLINE_S)
        turn_s = meter.longest_s
        assert report.clean
        return Measured(engine.aborted_at() - asked, turn_s)


class _Aborter:
    """A thread with a loop and a warm connection of its own, for nothing but aborts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(CALL_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CALL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(self._url + "/ping") as response:
            await response.read()

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _abort(self) -> None:
        assert self._session is not None
        async with self._session.post(self._url + "/abort_request", data=b'{"abort_all":true}') as response:
            await response.read()

    def abort(self) -> Any:
        """Send one; returns a future of its answer."""
        return asyncio.run_coroutine_threadsafe(self._abort(), self._loop)


async def _floor(engine: Burst, in_flight: int, aborter: _Aborter) -> Measured:
    """A bare client: the same answers read and parsed in its loop, the abort sent from another."""
    async with Floor(engine.url) as floor:
        enough = asyncio.Event()

        async def one() -> None:
            await floor.generate()
            if floor.done == READ_FIRST:
                enough.set()

        tasks = []
        for number in range(in_flight):
            tasks.append(asyncio.create_task(one()))
            if number % OPEN_AT_ONCE == 0:
                await asyncio.sleep(0.01)  # paced, as connecting has to be
        await engine.filled(in_flight)
        engine.fill_the_door()
        meter = TurnMeter(asyncio.get_running_loop())
        engine.command("POST", "/burst")
        meter.reset()
        await enough.wait()
        asked = time.monotonic()
        answer = aborter.abort()
        await asyncio.gather(*tasks)
        await asyncio.wrap_future(answer)
        return Measured(engine.aborted_at() - asked, meter.longest_s)


def _measure(in_flight: int) -> tuple[Measured, Measured]:
    """Measure both once, ours first."""
    with Burst(in_flight) as engine, _as_served():
        ours = run(_ours(engine, in_flight))
    with Burst(in_flight) as engine, _Aborter(engine.url) as aborter, _as_served():
        floor = asyncio.run(_floor(engine, in_flight, aborter))
    return ours, floor


@pytest.mark.timeout(300)
def test_an_abort_is_not_queued_behind_answers() -> None:
    """Every data connection busy, the accept queue full, all answers landing at once: the abort goes out."""  # P16
    raise_open_files()
    pairs = [_measure(IN_FLIGHT) for _ in range(ROUNDS)]
    told = [[(round(1000 * m.abort_s, 1), round(1000 * m.turn_s, 1)) for m in pair] for pair in pairs]
    print("abort ms, turn ms, ours and floor:", told)  # noqa: T201 - shown by `-s`
    abort_s, floor_abort_s = (median(pair[side].abort_s for pair in pairs) for side in (0, 1))
    turn_s, floor_turn_s = (median(pair[side].turn_s for pair in pairs) for side in (0, 1))
    assert abort_s <= max(FACTOR * floor_abort_s, AT_ONCE_S), told
    assert turn_s <= FACTOR * floor_turn_s, told
