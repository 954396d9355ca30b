"""Fetching: every owner at once, each shard once, each with its own end, all of it in time."""

import gc
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards import Fetcher, Meta, Node, Shard, ShardOwner
from rollout_svc.tensors.shards.buffer import Claim, FetchBuffer
from rollout_svc.tensors.shards.client import Wanted
from rollout_svc.tensors.shards.fetching import BATCH_BYTES, BATCH_SHARDS
from tests.support.shards import Script, answer, framed, read_request, scripted

META = Meta((4,), "uint8", "numpy")


def _shard(name: str, owner: str = "fake:1", nbytes: int = 4) -> tuple[Shard, Meta]:
    return Shard(name, owner, nbytes), META._replace(shape=(nbytes,))


class Fake:
    """A transport that notes what it is asked for, and may be held up, fail, or break."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.asking = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.may_go.set()
        self.breaks: BaseException | None = None

    def fetch(self, address: str, wanted: Sequence[Wanted], deadline: float) -> list[ShardFailure | None]:
        """Fill every blank with sevens."""
        self.asked.append((address, [shard.id for shard, _ in wanted]))
        self.asking.release()
        if not self.may_go.wait(max(deadline - time.monotonic(), 0)):
            return [ShardFailure("timeout", "held up", (shard.id,)) for shard, _ in wanted]
        if self.breaks is not None:
            raise self.breaks
        for _, blank in wanted:
            blank.memory[:] = b"\7" * blank.nbytes
        return [None] * len(wanted)


class Joining(FetchBuffer):
    """A buffer that says when somebody waits for another one's fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = threading.Semaphore(0)

    def claim(self, ids: Iterable[str]) -> Claim:
        found = super().claim(ids)
        if found.joined:
            self.joins.release()
        return found


def test_many_shards_go_in_one_request() -> None:
    """One request an owner, bounded in number and in bytes; a shard that was wanted twice is asked for once."""
    fake = Fake()
    fetcher = Fetcher(transports={"fake": fake})
    found = fetcher.fetch([_shard(f"{number % 700}") for number in range(1400)])
    assert len(found) == 700
    assert [len(ids) for _, ids in fake.asked] == [700]
    fetcher.fetch([_shard(f"more-{number}") for number in range(BATCH_SHARDS + 1)])
    assert [len(ids) for _, ids in fake.asked[1:]] == [BATCH_SHARDS, 1]
    fetcher.fetch([_shard(f"big-{number}", nbytes=BATCH_BYTES // 2) for number in range(3)])
    assert [len(ids) for _, ids in fake.asked[3:]] == [2, 1]
    fetcher.close()


def test_owners_are_asked_at_once() -> None:
    """Three owners, each held up until all of them are asked: none waits for another."""
    fake = Fake()
    fake.may_go.clear()
    fetcher = Fetcher(transports={"fake": fake})

    def let_go() -> bool:
        asked = [fake.asking.acquire(timeout=10) for _ in range(3)]
        fake.may_go.set()
        return all(asked)

    with ThreadPoolExecutor(1) as other:
        all_asked = other.submit(let_go)
        found = fetcher.fetch([_shard(f"{number}", f"fake:{number}") for number in range(3)], timeout_s=20)
        assert all_asked.result(20)
    assert [found[name].tolist() for name in "012"] == [[7] * 4] * 3
    fetcher.close()


def test_two_calls_at_once_fetch_once() -> None:
    """Single-flight: who comes second waits for what the first one fetches, and fetches only the rest."""
    fake, buffer = Fake(), Joining()
    fake.may_go.clear()
    fetcher = Fetcher(buffer, transports={"fake": fake})
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(fetcher.fetch, [_shard("a"), _shard("b")])
        assert fake.asking.acquire(timeout=10)
        second = threads.submit(fetcher.fetch, [_shard("b"), _shard("c")])
        assert buffer.joins.acquire(timeout=10)
        fake.may_go.set()
        assert set(first.result(10)) == {"a", "b"}
        assert set(second.result(10)) == {"b", "c"}
    assert sorted(ids for _, ids in fake.asked) == [["a", "b"], ["c"]]
    fetcher.close()


def test_who_has_more_time_fetches_anew() -> None:
    """A fetch that ran out of its own caller's time is no failure for those who wait with more of it."""
    fake, buffer = Fake(), Joining()
    fake.may_go.clear()
    fetcher = Fetcher(buffer, transports={"fake": fake})
    with ThreadPoolExecutor(2) as threads:
        hasty = threads.submit(fetcher.fetch, [_shard("a")], 0.3)
        assert fake.asking.acquire(timeout=10)
        patient = threads.submit(fetcher.fetch, [_shard("a")], 20)
        assert buffer.joins.acquire(timeout=10)
        assert hasty.result(10)["a"].reason == "timeout"
        fake.may_go.set()
        assert patient.result(10)["a"].tolist() == [7] * 4
    assert len(fake.asked) == 2
    fetcher.close()


def test_who_has_less_time_gives_up_sooner() -> None:
    """Every wait is bounded by its own deadline, also the one for what somebody else fetches."""
    fake, buffer = Fake(), Joining()
    fake.may_go.clear()
    fetcher = Fetcher(buffer, transports={"fake": fake})
    with ThreadPoolExecutor(2) as threads:
        patient = threads.submit(fetcher.fetch, [_shard("a")], 20)
        assert fake.asking.acquire(timeout=10)
        hasty = threads.submit(fetcher.fetch, [_shard("a")], 0.1)
        try:
            assert hasty.result(10)["a"].reason == "timeout"
        finally:
            fake.may_go.set()
        assert patient.result(10)["a"].tolist() == [7] * 4
    fetcher.close()


def test_a_broken_fetch_ends_all_its_flights() -> None:
    """Whatever happens to who fetches, whoever waits is told, and the next one fetches anew."""
    fake = Fake()
    fake.breaks = KeyboardInterrupt()
    fetcher = Fetcher(transports={"fake": fake})
    with pytest.raises(KeyboardInterrupt):
        fetcher.fetch([_shard("a"), _shard("b")])
    assert fetcher.buffer.stats()[:3] == (0, 0, 0)
    fake.breaks = ZeroDivisionError("a bug")
    found = fetcher.fetch([_shard("a", "fake:2"), _shard("no", "nothing:1")])  # the last owner is asked in this thread
    assert found["a"].reason == "unreachable"
    assert "a bug" in str(found["a"])
    assert found["no"].reason == "invalid"
    fake.breaks = None
    assert fetcher.fetch([_shard("a")])["a"].tolist() == [7] * 4
    fetcher.close()


def test_what_does_not_add_up_is_asked_of_nobody() -> None:
    """Shape, dtype and size contradict each other: that shard fails, the others do not."""
    fake = Fake()
    fetcher = Fetcher(transports={"fake": fake})
    found = fetcher.fetch([(Shard("a", "fake:1", 5), META), _shard("b")])
    assert (found["a"].reason, found["a"].ids, found["b"].tolist()) == ("invalid", ("a",), [7] * 4)
    assert fake.asked == [("fake:1", ["b"])]
    fetcher.close()


def test_a_tensor_of_torch_wants_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none its shards fail, with the reason, and nobody is left waiting; others are fetched."""
    monkeypatch.setitem(sys.modules, "torch", None)
    fake = Fake()
    fetcher = Fetcher(transports={"fake": fake})
    found = fetcher.fetch([(Shard("a", "fake:1", 4), META._replace(library="torch")), _shard("b")])
    assert found["a"].reason == "invalid"
    assert "torch" in str(found["a"])
    assert found["b"].tolist() == [7] * 4
    assert fetcher.buffer.stats().flights == 0
    fetcher.close()


def test_a_failure_keeps_nothing_alive() -> None:
    """P27: the tensors of a call that failed go with the call, without waiting for a collection."""
    with Node(ShardOwner()) as node:
        there = node.put(np.arange(4))
        fetcher = Fetcher(FetchBuffer(max_bytes=0))
        gc.disable()
        try:
            found = fetcher.fetch([there, (Shard("no", node.address, 4), META)])
            alive = weakref.ref(found[there[0].id].base)
            failure = found["no"]
            del found
            assert failure.reason == "missing"
            assert alive() is None
        finally:
            gc.enable()
        fetcher.close()


RECORD: dict[str, Any] = {"id": "a", "status": "ok", "nbytes": 4, "shape": [4], "dtype": "uint8", "library": "numpy"}


def _says(data: bytes) -> Script:
    return lambda peer: peer.sendall(data)


LIES: dict[str, tuple[bytes, str]] = {
    "is cut off": (answer(framed([RECORD], b"12"), 200), "unreachable"),
    "is shorter than its head says": (answer(framed([RECORD], b"12")), "unreachable"),
    "is about another shard": (answer(framed([{**RECORD, "id": "b"}], b"1234")), "invalid"),
    "has another shape": (answer(framed([{**RECORD, "shape": [2, 2]}], b"1234")), "invalid"),
    "has another size": (answer(framed([{**RECORD, "nbytes": 5}], b"12345")), "invalid"),
    "has a size below zero": (answer(framed([{**RECORD, "nbytes": -4}])), "invalid"),
    "is always late": (answer(framed([{"id": "a", "status": "later"}])), "invalid"),
    "has a status of its own": (answer(framed([{"id": "a", "status": "odd"}])), "invalid"),
    "has no head": (answer(b"\xff\xff\xff\xff"), "invalid"),
    "has a head that is no JSON": (answer(b"\2\0\0\0{]"), "invalid"),
    "is empty": (answer(b""), "unreachable"),
    "is no HTTP": (b"hello\r\n\r\n", "unreachable"),
    "is an error": (b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\n{}", "unreachable"),
    "does not come": (b"", "unreachable"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_owner_that_lies_fails_its_shard(lie: str) -> None:
    """P34: whatever is answered ends as a typed failure of that shard."""
    data, reason = LIES[lie]
    with scripted(_says(data)) as address:
        fetcher = Fetcher()
        found = fetcher.fetch([_shard("a", address)], timeout_s=10)["a"]
        assert isinstance(found, ShardFailure)
        assert (found.reason, found.ids) == (reason, ("a",))
        assert fetcher.buffer.stats()[:3] == (0, 0, 0)
        fetcher.close()


def test_what_arrived_before_the_cut_is_there() -> None:
    """A connection that breaks fails the shards that were still to come, and no other."""
    records = [RECORD, {**RECORD, "id": "b", "nbytes": 5, "shape": [5]}, {**RECORD, "id": "c"}]
    with scripted(_says(answer(framed(records, b"123412345..."), 2000))) as address:
        fetcher = Fetcher()
        found = fetcher.fetch([_shard("a", address), _shard("b", address, 5), _shard("c", address)], timeout_s=10)
        assert bytes(found["a"]) == b"1234"
        assert bytes(found["b"]) == b"12345"
        assert found["c"].reason == "unreachable"
        fetcher.close()


@pytest.mark.parametrize("trickles", [False, True])
def test_an_owner_that_hangs_is_given_up_in_time(*, trickles: bool) -> None:
    """Every wait is bounded by the one deadline, also when a byte comes now and then."""
    over = threading.Event()

    def hang(peer: socket.socket) -> None:
        body = answer(framed([{**RECORD, "nbytes": 4000, "shape": [4000]}]), 5000)
        for number in range(2000):
            if over.wait(0.02):
                return
            peer.sendall(body[number : number + 1] if trickles else b"")

    with scripted(hang) as address:
        fetcher = Fetcher()
        began = time.monotonic()
        found = fetcher.fetch([_shard("a", address, 4000)], timeout_s=0.3)["a"]
        assert found.reason == "timeout"
        assert 0.25 < time.monotonic() - began < 5
        over.set()
        fetcher.close()


def test_nobody_there_is_said_at_once() -> None:
    """A refused connection is a failure of the shards there; so is an address that is none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fetcher = Fetcher()
    found = fetcher.fetch([_shard("a", f"http://127.0.0.1:{port}"), _shard("b", "http://"), _shard("c", "http://h:x")])
    assert [found[name].reason for name in "abc"] == ["unreachable", "invalid", "invalid"]
    fetcher.close()


def test_a_connection_that_was_closed_meanwhile_is_opened_anew() -> None:
    """Keep-alive is an offer: who finds it withdrawn asks again, on a new connection."""
    served = answer(framed([RECORD], b"1234"))
    again = answer(framed([{**RECORD, "id": "b"}], b"5678"))

    def first(peer: socket.socket) -> None:
        peer.sendall(served)
        read_request(peer)  # the second request is read, and the connection closed under it

    with scripted(first, _says(again)) as address:
        fetcher = Fetcher()
        assert bytes(fetcher.fetch([_shard("a", address)], timeout_s=10)["a"]) == b"1234"
        assert repr(fetcher.client) == "<Client 1 idle connections>"
        assert bytes(fetcher.fetch([_shard("b", address)], timeout_s=10)["b"]) == b"5678"
        fetcher.close()
        assert repr(fetcher.client) == "<Client 0 idle connections>"
