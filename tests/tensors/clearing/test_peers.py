"""P29: how a controller reaches processes: over HTTP, and its own; and the controller without an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from threading import enumerate as enumerate_threads
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.errors import DrainFailed, ShardFailure
from rollout_svc.tensors.clearing import Consumer, Controller, SyncController
from rollout_svc.tensors.clearing.http import IDS_PER_REQUEST, HttpPeer, HttpPeers
from rollout_svc.tensors.clearing.local import LocalPeer
from rollout_svc.tensors.clearing.ports import Peer
from rollout_svc.tensors.rtensor import RTensor, flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import FetchBuffer, Fetcher, Node, Plane, ShardOwner, install
from rollout_svc.tensors.shards.names import check_address
from tests.support.peers import FakePeer, remote

TOKEN = "let me in"


@pytest.fixture
def node() -> Iterator[Node]:
    """A process that owns and consumes, over HTTP; nothing is left in it."""
    with Node(ShardOwner(), FetchBuffer(), token=TOKEN) as built:
        yield built
    assert built.owner is not None
    assert built.owner.handles.live == {}


@pytest.fixture
def fetcher(node: Node) -> Iterator[Fetcher]:
    """Fetches into the node's buffer."""
    fetcher = Fetcher(node.plane.buffer, token=TOKEN)
    yield fetcher
    fetcher.close()


@pytest.fixture
async def http() -> AsyncIterator[HttpPeers]:
    """A session of the test's loop."""
    peers = HttpPeers(TOKEN)
    yield peers
    await peers.close()


def _make(node: Node) -> RTensor:
    made = remotize(np.zeros(256, dtype=np.float32), node)
    assert isinstance(made, RTensor)
    return made


@pytest.fixture(params=["http", "local"])
def peer(request: pytest.FixtureRequest, node: Node, http: HttpPeers) -> Peer:
    """The same process, reached in either way."""
    return http(node.address) if request.param == "http" else LocalPeer(node.plane)


async def test_each_verb_does_what_it_says(peer: Peer, node: Node, fetcher: Fetcher) -> None:
    """P29: the buffer is drained or flushed, the owner drops; the figures tell."""
    one, two, three = (_make(node) for _ in range(3))
    await asyncio.to_thread(localize, [one, two, three], fetcher)
    await peer.drain([one.shard.id])
    assert node.plane.stats()["buffer"]["entries"] == 2
    await peer.drop([two.shard.id])
    stats = await peer.stats()
    assert (stats["buffer"]["entries"], stats["owner"]["entries"]) == (1, 2)
    assert stats["incarnation"] == node.plane.incarnation
    await peer.renew([one.shard.id])
    assert node.plane.stats()["owner"]["ids"] == (three.shard.id, one.shard.id)
    await peer.flush()
    assert node.plane.stats()["buffer"]["entries"] == 0


async def test_many_ids_go_in_several_requests(node: Node, http: HttpPeers) -> None:
    """P29: a data plane takes only so much at once; all of them arrive."""
    ids = [f"{number:x}" for number in range(2 * IDS_PER_REQUEST + 1)]
    await http(node.address).drain(ids)
    assert (await http(node.address).stats())["buffer"]["tombstones"] == len(ids)


async def test_what_a_process_answers_wrongly_is_its_failure(node: Node, http: HttpPeers) -> None:
    """P29: another key, nobody there, or something else that listens."""
    strangers = HttpPeers("another")
    with pytest.raises(ShardFailure, match=r"unauthorized: .* answered 401"):
        await strangers(node.address).drain(["x"])
    await strangers.close()
    with pytest.raises(ShardFailure, match=r"invalid: .*/nowhere/drain answered 404"):
        await http(f"{node.address}/nowhere").drain(["x"])
    with pytest.raises(ShardFailure, match="unreachable"):
        await http("http://127.0.0.1:1").stats()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\n1, 2")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ShardFailure, match="answered no JSON"):
            await http(f"http://127.0.0.1:{port}").stats()


async def test_the_controller_pops_its_own_buffer_first(node: Node, fetcher: Fetcher) -> None:
    """P29: of its node, or of its process where it has none."""
    batch = [_make(node), _make(node)]
    await asyncio.to_thread(localize, batch, fetcher)
    async with Controller(node.plane) as controller:
        cleared = await controller.clear_batches(batch)
    assert (cleared.entries, cleared.bytes, cleared.processes) == (0, 0, 1)
    assert {figures.parts for figures in cleared.statistics.figures} == {("controller[0]", "owner")}
    mine = Fetcher(token=TOKEN)
    before = install(mine)
    try:
        await asyncio.to_thread(localize, again := _make(node), mine)
        async with Controller(token=TOKEN) as controller:
            cleared = await controller.clear_batches(again)
        assert mine.buffer.stats().entries == 0
        assert (cleared.entries, cleared.processes) == (0, 2)
    finally:
        mine.close()
        if before is not None:
            install(before)


def test_a_peer_says_whom_it_reaches() -> None:
    """For people who look at what hangs."""
    assert repr(HttpPeer("http://a:1/", lambda: None)) == "<HttpPeer http://a:1>"  # type: ignore[arg-type,return-value]


def test_a_trainer_without_a_loop_has_the_same_methods(node: Node, fetcher: Fetcher) -> None:
    """P29: steps, decorated ones and verbs, from a thread that has no loop; its own threads end with it."""
    with SyncController(node.plane) as controller:
        with controller.step([_make(node)]) as step:
            step.add(extra := _make(node))
            localize(extra, fetcher)
            assert controller.live() == 2
        assert step.cleared is not None
        assert (step.cleared.ids, step.cleared.entries) == (2, 0)

        @controller.clears
        def train(batch: RTensor) -> RTensor:
            return _make(node)

        assert isinstance(train(_make(node)), RTensor)
        kept = _make(node)
        localize(kept, fetcher)
        for cleared in (controller.drain(flatten_shard_ids(kept)), controller.flush_all()):
            assert (cleared.entries, cleared.leaks) == (1, ())  # the owner keeps it, as it should
        assert controller.clear_batches(None).processes == 0
        assert controller.clear_batches(kept).entries == controller.statistics().entries == 0
    controller.close()
    assert [thread.name for thread in enumerate_threads() if "controller" in thread.name] == []


def test_a_controller_that_cannot_be_made_leaves_no_thread() -> None:
    """P35: nothing is half-started."""
    with pytest.raises(TypeError, match="patience"):
        SyncController(patience=3)
    assert [thread.name for thread in enumerate_threads() if "controller" in thread.name] == []


def test_a_step_without_a_loop_clears_however_it_ends() -> None:
    """P29: its own error wins; where there is none, what could not be drained is raised."""
    peer = FakePeer()
    with SyncController(Plane(), connect=lambda _: FakePeer(), attempts=1) as controller:
        controller.register("actor", [Consumer("a", peer=peer)])
        peer.failures = [OSError("refused")] * 3
        with controller.step(remote("1")):
            pass
        with pytest.raises(KeyError) as failed, controller.step(remote("2")):
            raise KeyError("reward")
        assert failed.value.__notes__ == ["a did not drain 1 ids: OSError: refused"]
        with pytest.raises(DrainFailed), controller.step(remote("3")):
            pass
        controller.unregister("actor")
        controller.clear_batches(remote("4"))
        assert peer.ids() == [("1",), ("1", "2"), ("2", "3")]


def test_a_controller_that_was_closed_says_so() -> None:
    """P35: whatever is asked of it, a step that begins too; closing it again is fine."""
    controller = SyncController(Plane())
    controller.close()
    asked: list[Callable[[], object]] = [
        lambda: controller.register("actor", ["http://a:1"]),
        lambda: controller.live(remote("1")),
        lambda: controller.clear_batches(remote("1")),
        controller.statistics,
        controller.flush_all,
        lambda: controller.step(remote("1")).__enter__(),
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match="this controller was closed"):
            ask()
    controller.close()


@given(st.sampled_from(["http", "https"]), st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True), st.integers(1, 65535))
def test_addresses_of_data_planes_and_actors_are_taken(scheme: str, host: str, port: int) -> None:
    """With a port or without, with a prefix or not, IPv6 too."""
    for address in (f"{scheme}://{host}:{port}", f"{scheme}://{host}:{port}/shards", f"{scheme}://[::1]:{port}"):
        check_address(address)
    check_address(f"ray:{host}")
    check_address(f"ray:trainer/{host}")


@pytest.mark.parametrize(
    "wrong", ["nope", "", "host:80", "http://", "http://:80", "http://a:x", "http://a:99999", "http://[::1", "ray:", 5]
)
def test_what_is_no_address_is_refused_before_anybody_is_registered(wrong: Any) -> None:
    """P35: a process under a name that nobody reaches would never be drained; P29 says that all are."""
    with SyncController(Plane()) as controller:
        plain: list[Any] = [wrong] if isinstance(wrong, str) else [Consumer(wrong)]
        for taken in (plain, ["http://a:1", *plain]):
            with pytest.raises(ValueError, match=r"expected http://host:port\[/prefix\] or ray:\[NAMESPACE/\]ACTOR"):
                controller.register("actor", taken)
        assert repr(controller).startswith("<SyncController 0 processes")
        controller.register("actor", [Consumer("anything", peer=FakePeer())])
