"""The transport over real sockets: two lanes that share nothing, and errors that are all ours."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollout_svc.engines import Call, Endpoint, HttpTransport, Reply
from rollout_svc.errors import WorkerFailure

GENERATE = Call("POST", "/generate", b"{}")
ABORT = Call("POST", "/abort_request", b'{"abort_all":true}', admin=True)
PING = Call("GET", "/ping")
PATIENCE_S = 20.0  # for what happens at once; only a failing test waits as long

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """A server that holds every generation until told, and remembers who came by which connection."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.arrived = asyncio.Queue[str]()
        self.peers: dict[str, set[object]] = {}
        self.keys: dict[str, str | None] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self.peers.setdefault(request.path, set()).add(transport.get_extra_info("peername"))
        self.keys[request.path] = request.headers.get("Authorization")
        self.arrived.put_nowait(request.path)
        if request.path == "/generate":
            await self.release.wait()
        return web.Response(body=await request.read())


@asynccontextmanager
async def served(handler: Handler, *, notices: bool = False) -> AsyncIterator[str]:
    """Serve one handler for every path, cancelled when its client leaves if it `notices`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=notices)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[Engine, HttpTransport]]:
    """Serve a holding engine beside a transport; nothing is held on the way out."""
    held = Engine()
    async with served(held.handle) as url, HttpTransport() as transport:
        held.url = url
        try:
            yield held, transport
        finally:
            held.release.set()


@asynccontextmanager
async def raw_server(answer: bytes, *, reset: bool) -> AsyncIterator[str]:
    """Serve bytes as they are to whoever asks, then hang up: in order, or by a reset."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            writer.transport.abort()
        else:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


def free_port() -> int:
    """Name a port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def failure_of(call: Awaitable[Reply]) -> WorkerFailure:
    """Await a call that must fail as the worker's."""
    with pytest.raises(WorkerFailure) as caught:
        await call
    return caught.value


async def test_control_goes_through_while_data_is_stuck() -> None:
    """With every data connection waiting, an abort is answered at once, on a connection of its own."""  # P16
    async with engine() as (held, transport):
        endpoint = Endpoint(held.url, None, None)
        stuck = [asyncio.create_task(transport.data(endpoint, GENERATE)) for _ in range(200)]
        for _ in stuck:
            await asyncio.wait_for(held.arrived.get(), PATIENCE_S)
        reply = await transport.control(endpoint, ABORT, PATIENCE_S)
        assert (reply.status, reply.body) == (200, ABORT.body)
        assert not any(task.done() for task in stuck)
        assert not held.peers["/generate"] & held.peers["/abort_request"]
        held.release.set()
        assert [(await task).status for task in stuck] == [200] * 200


async def test_control_never_takes_an_idle_data_connection() -> None:
    """A connection a generation used and left is not the next control call's, nor the other way round."""  # P16
    async with engine() as (held, transport):
        held.release.set()
        endpoint = Endpoint(held.url, None, None)
        for _ in range(3):
            await transport.data(endpoint, GENERATE)
            await transport.control(endpoint, ABORT, PATIENCE_S)
            await transport.control(endpoint, PING, PATIENCE_S)
        assert len(held.peers["/generate"]) == 1  # kept alive
        assert held.peers["/abort_request"] == held.peers["/ping"]  # and so is the control connection
        assert not held.peers["/generate"] & held.peers["/ping"]


@pytest.mark.parametrize(
    ("api", "admin", "keys"),
    [
        (None, None, (None, None, None)),
        ("k", None, ("Bearer k", "Bearer k", "Bearer k")),
        ("k", "adm", ("Bearer k", "Bearer k", "Bearer adm")),
        (None, "adm", (None, None, "Bearer adm")),
    ],
)
async def test_each_lane_has_its_key(api: str | None, admin: str | None, keys: tuple[str | None, ...]) -> None:
    """Generations and probes carry the data key, administration the admin key, or the data key where it is the only."""
    async with engine() as (held, transport):
        held.release.set()
        endpoint = Endpoint(held.url + "/", api, admin)
        await transport.data(endpoint, GENERATE)
        await transport.control(endpoint, PING, PATIENCE_S)
        await transport.control(endpoint, ABORT, PATIENCE_S)
        assert (held.keys["/generate"], held.keys["/ping"], held.keys["/abort_request"]) == keys


@pytest.mark.parametrize("lane", ["data", "control"])
async def test_a_refused_connection(lane: str) -> None:
    """Nobody listens: the worker's fault for certain, and nothing can be running there."""  # P19
    endpoint = Endpoint(f"http://127.0.0.1:{free_port()}", None, None)
    async with HttpTransport() as transport:
        call = transport.data(endpoint, GENERATE) if lane == "data" else transport.control(endpoint, PING, PATIENCE_S)
        failure = await failure_of(call)
    assert (failure.kind, failure.hard, failure.accepted) == ("connection", True, False)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", b"HTTP/1.1 200 OK\r\nX"])
async def test_a_connection_that_ends_in_the_middle(answer: bytes, reset: bool) -> None:
    """Once the request was written it may be running, whatever came back."""  # P20
    async with raw_server(answer, reset=reset) as url, HttpTransport() as transport:
        failure = await failure_of(transport.data(Endpoint(url, None, None), GENERATE))
    assert (failure.kind, failure.hard, failure.accepted) == ("connection", True, True)


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n\r\n",
        b"HTTP/1.1 banana\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: deflate\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_http(answer: bytes) -> None:
    """A server that speaks something else fails as a worker, not as an exception of the HTTP library."""  # P4
    async with raw_server(answer, reset=False) as url, HttpTransport() as transport:
        failure = await failure_of(transport.data(Endpoint(url, None, None), GENERATE))
    assert failure.kind == "connection"


async def test_a_url_that_is_none() -> None:
    """An address that cannot be parsed or reached fails as a worker."""
    async with HttpTransport() as transport:
        for url in ("http://", "http://127.0.0.1:99999"):
            failure = await failure_of(transport.data(Endpoint(url, None, None), GENERATE))
            assert failure.kind == "connection"


async def test_a_control_call_has_its_own_bound() -> None:
    """An engine that takes a control call and says nothing costs its timeout, and may have heard it."""  # P8
    async with engine() as (held, transport):
        failure = await failure_of(transport.control(Endpoint(held.url, None, None), GENERATE, 0.05))
    assert (failure.kind, failure.hard, failure.accepted) == ("control_timeout", False, True)


@pytest.mark.parametrize("lane", ["data", "control"])
async def test_cancellation_propagates(lane: str) -> None:
    """A cancelled call is cancelled, and the engine sees its connection close."""  # P14
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def handle(_: web.Request) -> web.StreamResponse:
        never: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()
        arrived.set()
        try:
            return await never
        finally:
            gone.set()

    async with served(handle, notices=True) as url, HttpTransport() as transport:
        endpoint = Endpoint(url, None, None)
        call = transport.data(endpoint, GENERATE) if lane == "data" else transport.control(endpoint, PING, PATIENCE_S)
        task = asyncio.create_task(call)
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_a_scope_around_a_data_call_stays_its_owners() -> None:
    """A time limit set around a generation ends as TimeoutError there, never as a failure of the worker."""
    async with engine() as (held, transport):

        async def bounded() -> None:
            async with asyncio.timeout(None) as scope:
                arrival = asyncio.create_task(held.arrived.get())
                arrival.add_done_callback(lambda _: scope.reschedule(0))
                await transport.data(Endpoint(held.url, None, None), GENERATE)

        with pytest.raises(TimeoutError):
            await bounded()


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (None, None),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
    ],
)
async def test_retry_after(sent: str | None, read: float | None) -> None:
    """Seconds are read; dates, words and numbers nobody can wait for are as if nothing was said."""  # P20

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503, headers={} if sent is None else {"Retry-After": sent})

    async with served(handle) as url, HttpTransport() as transport:
        reply = await transport.data(Endpoint(url, None, None), GENERATE)
    assert (reply.status, reply.retry_after_s) == (503, read)


async def test_a_redirect_is_an_answer() -> None:
    """Keys are not carried to wherever a redirect points: the status comes back as it is."""  # P34
    followed = False

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal followed
        followed = followed or request.path == "/elsewhere"
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with served(handle) as url, HttpTransport() as transport:
        reply = await transport.data(Endpoint(url, "secret", None), GENERATE)
    assert (reply.status, followed) == (307, False)


async def test_closing_is_idempotent() -> None:
    """A transport may be closed twice, and unused."""
    transport = HttpTransport()
    await transport.close()
    await transport.close()
