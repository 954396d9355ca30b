"""The data plane over HTTP: who may ask, for how much, and what is answered."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.rtensor import flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import Client, FetchBuffer, Fetcher, Node, Plane, ShardOwner, build_plane
from rollout_svc.tensors.shards.sending import THREADS
from rollout_svc.tensors.store import InMemory, MemoryStore

TOKEN = "a token"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CALLS = [("POST", "fetch"), ("POST", "renew"), ("POST", "drop"), ("POST", "drain"), ("POST", "flush"), ("GET", "stats")]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that wants a token."""
    with Node(ShardOwner(), FetchBuffer(), token=TOKEN) as node:
        yield node


def _ask(node: Node, method: str, call: str, body: bytes = b"{}", **headers: str) -> tuple[int, Any]:
    target = urlsplit(node.address)
    connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=10)
    connection.request(method, f"/{call}", body, headers)
    response = connection.getresponse()
    found = response.read()
    connection.close()
    return response.status, found if call == "fetch" and response.status == 200 else json.loads(found)


@pytest.mark.parametrize(("method", "call"), CALLS)
def test_every_call_wants_the_token(node: Node, method: str, call: str) -> None:
    """P34: without it, with another, with another scheme, with bytes that are no text: 401, and nothing is done."""
    ids = flatten_shard_ids(remotize([np.zeros(4)], node))
    body = json.dumps({"ids": ids}).encode()
    for given in (
        {},
        {"Authorization": "Bearer b"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xff"},
    ):
        status, found = _ask(node, method, call, body, **given)
        assert (status, found["error"]["type"]) == (401, "unauthorized")
    assert node.owner is not None
    assert node.owner.stats().entries == 1
    assert _ask(node, method, call, body, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_beyond_loopback_only_with_a_token() -> None:
    """P34: and whoever binds everything says where it is reached."""
    with pytest.raises(ValueError, match="needs a token"):
        Node(host="0.0.0.0", advertise="http://10.0.0.1:7000")
    with pytest.raises(ValueError, match="advertise"):
        Node(host="0.0.0.0", token=TOKEN)
    with Node(ShardOwner(), host="0.0.0.0", token=TOKEN, advertise="http://10.0.0.1:7000/") as node:
        assert node.put(np.zeros(1))[0].owner == "http://10.0.0.1:7000"


def test_a_taken_port_is_said_at_once() -> None:
    """Whoever starts a node hears of it, not a thread."""
    with Node() as node, pytest.raises(OSError, match="address already in use"):
        Node(port=int(urlsplit(node.address).port or 0))


def test_the_answer_is_a_head_and_bytes(node: Node) -> None:
    """P34: no pickle: sizes and names as JSON, then the bytes as they lie."""
    remote = remotize([np.arange(3, dtype=np.uint16), np.zeros((), dtype=np.uint8)], node)
    first, second = flatten_shard_ids(remote)
    body = json.dumps({"ids": [second, "nobody's", first]}).encode()
    _, found = _ask(node, "POST", "fetch", body, Authorization=f"Bearer {TOKEN}")
    length = int.from_bytes(found[:4], "little")
    assert json.loads(found[4 : 4 + length]) == {
        "shards": [
            {"id": second, "status": "ok", "nbytes": 1, "shape": [], "dtype": "uint8", "library": "numpy"},
            {"id": "nobody's", "status": "missing"},
            {"id": first, "status": "ok", "nbytes": 6, "shape": [3], "dtype": "uint16", "library": "numpy"},
        ]
    }
    assert found[4 + length :] == b"\0" + b"\0\0\1\0\2\0"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"ids": "abc"}', b'{"ids": [1]}', b"\x80\x04N."])
def test_a_bad_body_is_named(node: Node, body: bytes) -> None:
    """P35: one clear error, whatever it is; a pickle is no JSON."""
    for call in ("fetch", "drop", "drain", "renew"):
        status, found = _ask(node, "POST", call, body, Authorization=f"Bearer {TOKEN}")
        assert (status, found["error"]["type"]) == (400, "bad_request")


def test_drop_lets_go_of_both(node: Node) -> None:
    """P29: the storage owner's own buffer is drained with its shards: it may consume as well."""
    remote = remotize({"a": np.arange(4)}, node)
    assert node.plane.buffer is not None
    consumer = Fetcher(node.plane.buffer, token=TOKEN, local=node.owner)
    assert localize(remote, consumer)["a"].tolist() == [0, 1, 2, 3]
    client = Client(TOKEN)
    stats = client.stats(node.address)
    assert (stats["owner"]["entries"], stats["buffer"]["entries"], stats["buffer"]["bytes"]) == (1, 1, 32)
    assert stats["incarnation"] == node.plane.incarnation
    assert client.post(node.address, "drop", flatten_shard_ids(remote)) == {"entries": 1, "bytes": 32}
    stats = client.stats(node.address)
    assert (stats["owner"]["entries"], stats["buffer"]["entries"], stats["buffer"]["bytes"]) == (0, 0, 0)
    client.close()
    consumer.close()


def test_drain_and_flush_are_two_verbs(node: Node) -> None:
    """The one takes ids, the other takes everything; both leave the owner's shards alone."""
    remote = remotize([np.arange(2), np.arange(3)], node)
    consumer, client = Fetcher(node.plane.buffer, local=node.owner), Client(TOKEN)
    localize(remote, consumer)
    assert client.post(node.address, "drain", flatten_shard_ids(remote)[:1]) == {"entries": 1, "bytes": 16}
    assert client.post(node.address, "flush", None) == {"entries": 1, "bytes": 24}
    assert client.post(node.address, "renew", [*flatten_shard_ids(remote), "nobody's"]) == {"entries": 2}
    client.close()
    consumer.close()


def test_a_process_that_only_consumes_has_no_shards() -> None:
    """Its drops drain, its fetches are refused, and its statistics say so."""
    with Node(None, FetchBuffer()) as node:
        client = Client()
        assert client.post(node.address, "drop", ["a"]) == {"entries": 0, "bytes": 0}
        assert client.stats(node.address)["owner"] is None
        with pytest.raises(ShardFailure, match="404: there is no owner of shards"):
            client.post(node.address, "fetch", ["a"])
        with pytest.raises(ValueError, match="only consumes"):
            node.put(np.zeros(1))
        client.close()


async def test_it_can_be_mounted_under_a_prefix() -> None:
    """What it is mounted in asks for the token; the prefix is part of the owner's address."""
    owner = ShardOwner()
    app = web.Application()
    app.add_subapp("/v1/tensors/", build_plane(Plane(owner, FetchBuffer())))
    async with TestServer(app) as server:
        owner.address = f"http://127.0.0.1:{server.port}/v1/tensors"
        fetcher, remote = Fetcher(), remotize(np.arange(3), owner)
        stats = await asyncio.to_thread(fetcher.client.stats, owner.address)
        assert stats["owner"]["entries"] == 1
        assert (await asyncio.to_thread(localize, remote, fetcher)).tolist() == [0, 1, 2]
        fetcher.close()


def test_a_request_is_bounded() -> None:
    """P34: 413, and the connection is of use to nobody."""
    plane = Plane(ShardOwner("http://127.0.0.1:1"), max_request_bytes=1000)
    with Node(plane=plane) as node, pytest.raises(ShardFailure, match="413"):
        Client().post(node.address, "drop", ["x" * 2000])


async def test_a_request_is_bounded_where_more_is_allowed() -> None:
    """P34: mounted in an application that takes more, it takes no more; what never comes is not waited for."""
    plane = Plane(ShardOwner("http://127.0.0.1:1"), max_request_bytes=1000, stall_s=0.05)
    app = web.Application(client_max_size=10_000)
    app.add_subapp("/shards/", build_plane(plane))
    async with TestServer(app) as server:
        address, client = f"http://127.0.0.1:{server.port}/shards", Client()
        with pytest.raises(ShardFailure, match="413: a request is 1000 bytes long at the most"):
            await asyncio.to_thread(client.post, address, "drop", ["x" * 2000])
        client.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b'POST /shards/drop HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"ids":')
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()


def test_an_answer_is_bounded() -> None:
    """P34: what does not fit beside the others is asked for again; what fits into no answer is said to be too big."""
    owner = ShardOwner()
    with Node(plane=Plane(owner, max_response_bytes=100)) as node:
        tree = [np.full(40, number, dtype=np.uint8) for number in range(6)]
        remote = remotize([*tree, np.zeros(101, dtype=np.uint8)], node)
        fetcher = Fetcher()
        found = localize(remote, fetcher, on_failure="place")
        assert [one.tolist() for one in found[:6]] == [one.tolist() for one in tree]
        assert found[6].reason == "too_big"
        fetcher.close()


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    """P34: its shards are not held for ever, nor is its connection."""
    ended = asyncio.Event()

    @web.middleware
    async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            ended.set()

    owner = ShardOwner("http://127.0.0.1:1")
    remote = remotize(np.zeros(32 * 2**20, dtype=np.uint8), owner)
    app = web.Application(middlewares=[watched])
    app.add_subapp("/shards/", build_plane(Plane(owner, stall_s=0.05)))
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
        body = json.dumps({"ids": [remote.shard.id]}).encode()
        writer.write(b"POST /shards/fetch HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            await ended.wait()
            received = 0
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(2**20):
                    received += len(data)
            assert 0 < received < remote.nbytes
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _asked(port: int, shard_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a shard, and read no more than that the answer has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    body = json.dumps({"ids": [shard_id]}).encode()
    writer.write(b"POST /fetch HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    return reader, writer


async def test_more_answers_than_threads_are_sent() -> None:
    """Slow readers, more than there are threads to send to them, get all of it; so do those who come later."""
    with Node(ShardOwner()) as node:
        port = urlsplit(node.address).port or 0
        data = np.random.default_rng(0).integers(0, 255, 16 * 2**20, dtype=np.uint8)
        remote = await asyncio.to_thread(remotize, data, node)
        async with asyncio.timeout(30):
            slow = [await _asked(port, remote.shard.id) for _ in range(THREADS + 2)]
            fetcher = Fetcher()
            assert np.array_equal(await asyncio.to_thread(localize, remote, fetcher), data)
            fetcher.close()
            for reader, writer in slow:
                await reader.readuntil(b"\r\n\r\n")
                head = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
                assert json.loads(head)["shards"][0]["status"] == "ok"
                assert await reader.readexactly(data.nbytes) == data.tobytes()
                writer.close()
                await writer.wait_closed()


async def test_the_end_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that closes cuts off whoever takes nothing, and every shard is released."""
    monkeypatch.setattr("rollout_svc.tensors.shards.node.STOP_S", 0.05)
    node = Node(ShardOwner())
    remote = await asyncio.to_thread(remotize, np.zeros(32 * 2**20, dtype=np.uint8), node)
    async with asyncio.timeout(10):
        _, writer = await _asked(urlsplit(node.address).port or 0, remote.shard.id)
        await asyncio.to_thread(node.close)
        assert node.owner is not None
        assert node.owner.handles.live == {}
        writer.transport.abort()


class Watched(InMemory):
    """Says when it was freed."""

    def __init__(self, tensor: np.ndarray[Any, Any], freed: threading.Event) -> None:
        super().__init__(tensor)
        self.freed = freed

    __slots__ = ("freed",)

    def free(self) -> None:
        super().free()
        self.freed.set()


class WatchedStore(MemoryStore):
    """Keeps tensors that say when they were freed."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def put(self, tensor: np.ndarray[Any, Any]) -> Watched:
        return Watched(tensor, self.freed)


def test_leases_end_where_nobody_asks() -> None:
    """P29: an owner of which everybody has forgotten lets go all the same."""
    store = WatchedStore()
    owner = ShardOwner(store=store, lease_s=0.05)
    with Node(owner) as node:
        node.put(np.zeros(4))
        assert store.freed.wait(10)
        assert owner.handles.live == {}
