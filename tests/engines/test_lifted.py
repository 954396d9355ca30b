"""Lifting over real sockets: answers that are slow, cut, too large, given up, or twenty at once."""

import asyncio
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from rollout_svc.engines import Call, Completion, Endpoint, HttpTransport, Reply
from rollout_svc.engines.calls import Lift
from rollout_svc.errors import SampleFailure
from tests.engines.test_http import PATIENCE_S, failure_of, raw_server, served

MIB = 1 << 20
BASE64 = Lift("routed_experts", "base64", 64 * MIB)
NUMBERS = Lift("routed_experts", "numbers", 64 * MIB)
VALUE = np.random.default_rng(0).integers(0, 128, (3000, 4, 8)).astype("<i4")


def a_call(lift: Lift | None = BASE64) -> Call:
    return Call("POST", "/generate", b"{}", lift=lift)


def a_body(value: Any = None) -> bytes:
    text = b64encode(VALUE.tobytes()).decode() if value is None else value
    return orjson.dumps({"output_ids": [1, 2], "meta_info": {"routed_experts": text, "id": "x"}})


class Reader:
    """Keeps what it is fed."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def feed(self, payload: bytes) -> None:
        self.payloads.append(payload)

    def completion(self) -> Completion:
        raise NotImplementedError

    def partial(self) -> Completion | None:
        return None


@asynccontextmanager
async def answering(body: bytes, **options: Any) -> AsyncIterator[tuple[HttpTransport, Endpoint]]:
    """A transport, and an engine that answers that."""

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, **options)

    async with served(handle) as url, HttpTransport() as transport:
        yield transport, Endpoint(url, None, None)


Send = Callable[[bytes], Any]


@asynccontextmanager
async def sending(script: Callable[[Send], Any], kind: str = "application/json") -> AsyncIterator[Any]:
    """A transport, an engine that plays a script in chunks, and what is set when that ended or its client left."""
    gone = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        try:
            await script(response.write)
        finally:
            gone.set()
        return response

    async with served(handle, notices=True) as url, HttpTransport() as transport:
        yield transport, Endpoint(url, None, None), gone


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_whole_answer(streamed: bool) -> None:
    """The value is taken out, and null stands in its place; an engine that was asked to stream may answer whole too."""
    async with answering(a_body(), content_type="application/json") as (transport, endpoint):
        reader = Reader()
        reply = await (transport.stream(endpoint, a_call(), reader) if streamed else transport.data(endpoint, a_call()))
    assert bytes(reply.lifted) == VALUE.tobytes()
    assert orjson.loads(reply.body) == {"output_ids": [1, 2], "meta_info": {"routed_experts": None, "id": "x"}}
    assert reader.payloads == []


async def test_nested_lists_and_keys() -> None:
    """Numbers become an array of three dimensions; a string is itself."""
    async with answering(a_body(VALUE.tolist())) as (transport, endpoint):
        reply = await transport.data(endpoint, a_call(NUMBERS))
    assert reply.lifted.dtype == np.uint16
    assert np.array_equal(reply.lifted, VALUE)
    async with answering(a_body("0a1b")) as (transport, endpoint):
        assert (await transport.data(endpoint, a_call(NUMBERS))).lifted == "0a1b"


async def test_without_a_lift_nothing_is_taken_out() -> None:
    """The body is the engine's, byte for byte."""
    async with answering(a_body()) as (transport, endpoint):
        assert await transport.data(endpoint, a_call(None)) == Reply(200, a_body())


async def test_an_error_is_not_lifted() -> None:
    """Another status is told with its body as it came."""
    async with answering(a_body(), status=503, headers={"Retry-After": "2"}) as (transport, endpoint):
        assert await transport.data(endpoint, a_call()) == Reply(503, a_body(), 2.0)


async def test_no_compression_is_asked_for() -> None:
    """It would be undone in the loop."""
    asked: list[str | None] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Accept-Encoding"))
        response = web.Response(body=a_body())
        response.enable_compression()
        return response

    async with served(handle) as url, HttpTransport() as transport:
        reply = await transport.data(Endpoint(url, None, None), a_call())
    assert asked == ["identity"]
    assert bytes(reply.lifted) == VALUE.tobytes()


async def test_a_slow_answer_in_small_chunks() -> None:
    """Wherever it is cut."""

    async def script(send: Send) -> None:
        body = a_body()
        for at in range(200):
            await send(body[at : at + 1])
        for at in range(200, len(body), 7001):
            await send(body[at : at + 7001])

    async with sending(script) as (transport, endpoint, _):
        reply = await transport.data(endpoint, a_call())
    assert bytes(reply.lifted) == VALUE.tobytes()


async def test_events() -> None:
    """The reader is given events with null in them; the reply has the value, and no body."""
    text = b64encode(VALUE.tobytes() * 20)  # 10 MiB in one line

    async def script(send: Send) -> None:
        await send(b'data: {"n":1,"routed_experts":null}\n\n')
        await send(b'data: {"n":2,"routed_experts":"' + text + b'"}\n\ndata: [DONE]\n\n')

    async with sending(script, "text/event-stream") as (transport, endpoint, _):
        reader = Reader()
        reply = await transport.stream(endpoint, a_call(), reader)
    assert reader.payloads == [b'{"n":1,"routed_experts":null}', b'{"n":2,"routed_experts":null}', b"[DONE]"]
    assert (reply.status, reply.body) == (200, b"")
    assert bytes(reply.lifted) == VALUE.tobytes() * 20


@pytest.mark.parametrize("reset", [False, True])
async def test_an_answer_that_is_cut_off(reset: bool) -> None:
    """The worker failed, and may still be at it; what a stream had brought by then is in its reader."""  # P20
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 90000000\r\n\r\n"
    half = b'{"routed_experts":"' + b"A" * (2 * MIB)
    async with raw_server(head % b"application/json" + half, reset=reset) as url, HttpTransport() as transport:
        failure = await failure_of(transport.data(Endpoint(url, None, None), a_call()))
    assert (failure.kind, failure.hard, failure.accepted) == ("connection", True, True)
    events = b'data: {"n":1}\n\ndata: ' + half
    async with raw_server(head % b"text/event-stream" + events, reset=False) as url, HttpTransport() as transport:
        reader = Reader()
        await failure_of(transport.stream(Endpoint(url, None, None), a_call(), reader))
    assert reader.payloads == [b'{"n":1}']


@pytest.mark.parametrize("encoding", ["base64", "numbers"])
async def test_one_that_is_given_up(encoding: Any) -> None:
    """Cancelled half-way: the engine sees its connection close, and nothing of ours goes on."""  # P14
    arrived = asyncio.Event()

    async def script(send: Send) -> None:
        await send(b'{"routed_experts":' + (b'"AAAA' if encoding == "base64" else b"[[[1]]"))
        arrived.set()
        while True:
            await send(b"AAAA" * 10_000 if encoding == "base64" else b",[[1]]" * 10_000)

    async with sending(script) as (transport, endpoint, gone):
        call = a_call(Lift("routed_experts", encoding, 1 << 40))
        task = asyncio.create_task(transport.data(endpoint, call))
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        idle = transport._threads.submit(int)  # comes after whatever is still to be done
        await asyncio.wait_for(asyncio.wrap_future(idle), PATIENCE_S)
        assert transport._threads._work_queue.empty()


async def test_what_waits_for_a_thread_is_given_up_with_its_call() -> None:
    """A batch that was handed over and not begun is never begun."""  # P14

    async def script(send: Send) -> None:
        await send(b'{"routed_experts":"' + b"AAAA" * MIB)
        await asyncio.Event().wait()

    async with sending(script) as (transport, endpoint, gone):
        threads, lock = transport._threads, threading.Event()
        blocked = [threads.submit(lock.wait, PATIENCE_S) for _ in range(threads._max_workers)]
        task = asyncio.create_task(transport.data(endpoint, a_call()))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not all(job.running() for job in blocked) or threads._work_queue.empty():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                await gone.wait()
            assert task.cancelled()
            assert threads._work_queue.get_nowait().future.cancelled()
        finally:
            lock.set()


async def test_one_that_is_too_large() -> None:
    """Refused while it streams, and the engine sees its connection close: an answer may be without end."""  # P34
    sent = 0

    async def script(send: Send) -> None:
        nonlocal sent
        await send(b'{"routed_experts":"')
        while True:
            await send(b"AAAA" * 16_384)
            sent += 65_536

    async with sending(script) as (transport, endpoint, gone):
        with pytest.raises(SampleFailure, match="experts_too_large"):
            await transport.data(endpoint, a_call(Lift("routed_experts", "base64", 3 * MIB)))
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
    assert sent < 24 * MIB  # 4 MiB of text, two batches, and what the kernel keeps on both sides


@pytest.mark.parametrize(
    ("lift", "value"), [(BASE64, "AAA!" * 1000), (BASE64, [[[1]]]), (NUMBERS, [[[1]], [[1, 2]]]), (NUMBERS, [[[1.5]]])]
)
async def test_one_that_is_no_value(lift: Lift, value: Any) -> None:
    """A failure of the sample, not of the worker; the next call is made as ever."""  # P4
    async with answering(a_body(value)) as (transport, endpoint):
        with pytest.raises(SampleFailure, match="experts_invalid"):
            await transport.data(endpoint, a_call(lift))
        assert (await transport.data(endpoint, a_call(None))).body == a_body(value)


async def test_twenty_at_once_wait_for_those_who_decode() -> None:
    """While nobody decodes, engines can send what two batches and the kernel hold, and no more; then all are read."""
    size, stalls, sent = 16 * MIB, asyncio.Semaphore(0), 0

    async def script(send: Send) -> None:
        nonlocal sent
        await send(b'{"routed_experts":"')
        held = False
        for _ in range(size // 65_536):
            write = asyncio.ensure_future(send(b"AAAA" * 16_384))
            if not held and not (await asyncio.wait({write}, timeout=1.0))[0]:
                held = True
                stalls.release()
            await write
            sent += 65_536
        await send(b'"}')

    async with sending(script) as (transport, endpoint, _):
        lock = threading.Event()
        blocked = [transport._threads.submit(lock.wait, PATIENCE_S) for _ in range(2)]
        calls = [asyncio.create_task(_bytes_of(transport, endpoint)) for _ in range(20)]
        try:
            async with asyncio.timeout(PATIENCE_S):
                for _ in calls:
                    await stalls.acquire()
            assert sent < 20 * size * 0.75
        finally:
            lock.set()
        assert await asyncio.gather(*calls) == [size * 3 // 4] * 20
        assert all(job.done() for job in blocked)


async def _bytes_of(transport: HttpTransport, endpoint: Endpoint) -> int:
    return len((await transport.data(endpoint, a_call())).lifted)


async def test_closing_ends_the_threads() -> None:
    """A transport that was closed leaves none behind."""
    async with answering(a_body()) as (transport, endpoint):
        await transport.data(endpoint, a_call())
        threads = list(transport._threads._threads)
        assert threads
        await transport.close()
        for thread in threads:
            await asyncio.to_thread(thread.join, PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
