"""The trainer's publisher: one update at a time, each bucket once, whatever its caller and its callers do meanwhile."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch

from rollout_svc.embedded import receiving
from rollout_svc.engines.updates.protocol import Way
from rollout_svc.tensors.shared import own_prefix
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.protocol import Bodies, Engine, Named

PATIENCE_S = 10.0
ENGINES = [{"id": "w0", "dialect": "sglang", "ranks": 1}]
Told = Callable[["Asking"], Awaitable[None]]


def segments() -> set[str]:
    """This process's segments of weight updates."""
    return {path.name for path in receiving.FOLDER.glob(f"{own_prefix(receiving.PREFIX)}*")}


def tensors(count: int = 3) -> dict[str, torch.Tensor]:
    """As many tensors of 16 bytes."""
    return {f"t{place}": torch.full((4,), float(place)) for place in range(count)}


class Asking:
    """The service as the publisher has it: asks what it is told to by a test."""

    def __init__(self, session: aiohttp.ClientSession, source: Mapping[str, Any]) -> None:
        self._session = session
        self._url, self._token = source["publisher"], source["token"]

    async def __call__(self, path: str, token: str | None = None, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or self._token}"}
        async with self._session.post(f"{self._url}{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.json()


class Service:
    """Has a test's own way with every update."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.sources: list[Mapping[str, Any]] = []
        self.told: asyncio.Queue[Told] = asyncio.Queue()

    async def update_weights(
        self,
        version: int,
        source: Mapping[str, Any],
        *,
        pause: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Mapping[str, Any]:
        self.sources.append(source)
        async with asyncio.timeout(PATIENCE_S):
            told = await self.told.get()
            await told(Asking(self.session, source))
        return {"version": version}


class Nobody:
    """A service that is not asked."""

    async def update_weights(
        self,
        version: int,
        source: Mapping[str, Any],
        *,
        pause: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Mapping[str, Any]:
        raise AssertionError(version, source, pause)


@asynccontextmanager
async def publisher_and_service() -> AsyncIterator[tuple[WeightPublisher, Service]]:
    """A publisher with buckets of one tensor, and its service."""
    before = segments()
    async with aiohttp.ClientSession() as session:
        service = Service(session)
        async with WeightPublisher(service, bucket_bytes=16) as publisher:
            yield publisher, service
    assert segments() == before


async def nothing(_: Asking) -> None:
    """Ask for nothing."""


def names(answer: tuple[int, Any]) -> list[str]:
    """The tensors of a bucket."""
    status, body = answer
    assert status == 200, body
    return [meta["name"] for meta in body["bodies"]["w0"]["metadata"]]


async def test_a_second_update_at_the_same_time_is_refused() -> None:
    """P24: also where the first has not come to open its door yet."""
    async with publisher_and_service() as (publisher, service):
        first = asyncio.create_task(publisher.publish(tensors(), 1), name="first")
        second = asyncio.create_task(publisher.publish(tensors(), 2), name="second")
        await service.told.put(nothing)
        await service.told.put(nothing)
        found = await asyncio.gather(first, second, return_exceptions=True)
        assert found[0] == {"version": 1}
        assert isinstance(found[1], RuntimeError)


async def test_an_update_that_its_caller_left_gets_nothing_of_the_next() -> None:
    """P24: the service goes on with it; asked with its token, the publisher has nothing, and not an end either."""
    async with publisher_and_service() as (publisher, service):
        await service.told.put(nothing)
        await publisher.publish(tensors(), 1)
        old = service.sources[0]["token"]

        async def late(ask: Asking) -> None:
            assert (await ask("/begin", token=old, engines=ENGINES))[0] == 401
            assert (await ask("/next", token=old, bucket=0))[0] == 401

        await service.told.put(late)
        await publisher.publish(tensors(), 2)


async def test_nothing_is_given_before_it_was_begun() -> None:
    """P24: no bucket is not the same as no more buckets."""

    async def at_once(ask: Asking) -> None:
        assert await ask("/next", bucket=0) == (400, {"error": "no update was begun here"})

    async with publisher_and_service() as (publisher, service):
        await service.told.put(at_once)
        await publisher.publish(tensors(), 1)


async def test_nothing_is_given_after_its_end() -> None:
    """P30: a late question opens nothing again."""

    async def late(ask: Asking) -> None:
        await ask("/begin", engines=ENGINES)
        await ask("/end", whole=False)
        for path in ("/begin", "/next"):
            assert await ask(path, engines=ENGINES) == (400, {"error": "the update is over"})

    async with publisher_and_service() as (publisher, service):
        await service.told.put(late)
        await publisher.publish(tensors(), 1)


async def test_a_question_that_is_repeated_has_the_same_answer() -> None:
    """P24 P26: its answer was lost: no bucket is skipped, and a stream is not begun in its middle."""

    async def twice(ask: Asking) -> None:
        assert await ask("/begin", engines=ENGINES) == await ask("/begin", engines=ENGINES)
        for number in range(3):
            for _ in range(2):
                assert names(await ask("/next", bucket=number)) == [f"t{number}"]
        assert (await ask("/next", bucket=5))[0] == 400
        assert (await ask("/next", bucket=1))[0] == 400
        for _ in range(2):
            assert (await ask("/next", bucket=3))[1]["bodies"] is None

    async with publisher_and_service() as (publisher, service):
        await service.told.put(twice)
        await publisher.publish(iter(tensors().items()), 1)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a shard"), ValueError("lost")])
async def test_a_stream_that_failed_has_no_end(error: Exception) -> None:
    """P24: whatever it raised is told, and asked again it is not taken for one that is complete."""

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(2).items()
        raise error

    async def until_it_fails(ask: Asking) -> None:
        await ask("/begin", engines=ENGINES)
        assert names(await ask("/next", bucket=0)) == ["t0"]
        for _ in range(2):
            status, answer = await ask("/next", bucket=1)
            assert status == 400
            assert str(error) in answer["error"]

    async with publisher_and_service() as (publisher, service):
        await service.told.put(until_it_fails)
        await publisher.publish(failing(), 1)


class Held:
    """A stream whose second tensor is waited for."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.let = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(1).items()
        self.inside.set()
        assert self.let.wait(PATIENCE_S)
        yield from tensors(3).items()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_who_ends_it_in_the_middle_waits_for_what_is_being_written(how: str) -> None:
    """P24 P30: no thread writes to a buffer that was given up, and none is left in shared memory."""
    held = Held()

    async def one(ask: Asking) -> None:
        await ask("/begin", engines=ENGINES)
        await ask("/next", bucket=0)

    async with publisher_and_service() as (publisher, service):
        await service.told.put(one)
        publishing = asyncio.create_task(publisher.publish(held, 1), name="publishing")
        await asyncio.to_thread(held.inside.wait)
        if how == "cancelled":
            publishing.cancel()
        closing = asyncio.create_task(publisher.close(), name="closing")
        ending: asyncio.Task[Any] = publishing if how == "cancelled" else closing
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ending.done()
        held.let.set()
        await asyncio.gather(closing, publishing, return_exceptions=True)
        assert publisher._publishing is None


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer \udcff", ""])
async def test_who_does_not_show_the_token_gets_nothing(header: str) -> None:
    """P35: refused, whatever was shown."""
    async with publisher_and_service() as (publisher, service):

        async def wrong(_: Asking) -> None:
            url, headers = f"{service.sources[0]['publisher']}/begin", {"Authorization": header}
            async with service.session.post(url, json={"engines": ENGINES}, headers=headers) as answer:
                assert answer.status == 401

        await service.told.put(wrong)
        await publisher.publish(tensors(), 1)


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_buckets_of_no_bytes_are_refused_before_anything_is_stopped(bucket_bytes: int) -> None:
    """P35: at the making, and not in the middle of a pause."""
    with pytest.raises(ValueError, match="expected buckets of at least 1 byte"):
        WeightPublisher(Nobody(), bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "not NoneType"),
        (torch.zeros(2), "not Tensor"),
        ({1: torch.zeros(2)}, "not 1"),
        ("weights", "not str"),
        ({"a": 1}, "'a': it is int"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a': it is torch.sparse_coo"),
        ({"a": torch.zeros(2, device="meta")}, "on meta"),
        ({"a": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}, "gather it first"),
    ],
)
async def test_what_is_no_tensors_is_refused_before_anything_is_stopped(given: Any, told: str) -> None:
    """P35: the trainer's own slip is its own error, with the name, and the stage runs on."""
    async with WeightPublisher(Nobody()) as publisher:
        with pytest.raises(TypeError, match=re.escape(told)):
            await publisher.publish(given, 1, pause={})
        with pytest.raises(ValueError, match="at least one tensor"):
            await publisher.publish({}, 1, pause={})


class Stuck:
    """A sender whose second bucket waits for engines that do not come, until it is broken off."""

    way: Way = "distributed"
    allocated = 0
    one_dtype = True

    def __init__(self) -> None:
        self.stuck, self.broken_off = threading.Event(), threading.Event()
        self._written = 0

    def open(self, engines: Sequence[Engine]) -> Bodies:
        return {engine.engine_id: {} for engine in engines}

    def write(self, tensors: Sequence[Named]) -> Bodies:
        self._written += 1
        if self._written > 1:
            self.stuck.set()
            assert self.broken_off.wait(PATIENCE_S)
            raise OSError("broken off")
        return {"w0": {}}

    def close(self, *, whole: bool) -> None:
        """Nothing is under way."""

    def break_off(self) -> None:
        self.broken_off.set()

    def release(self) -> None:
        """Nothing is kept."""


async def test_what_waits_for_engines_that_do_not_come_is_broken_off_with_the_update() -> None:
    """P24: the service has given up: the trainer is not held up for as long as its sender may wait."""
    sender = Stuck()

    async def give_up(ask: Asking) -> None:
        await ask("/begin", engines=ENGINES)
        await ask("/next", bucket=0)
        following = asyncio.create_task(ask("/next", bucket=1))
        await asyncio.to_thread(sender.stuck.wait, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S / 2):
            assert (await ask("/end", whole=False))[0] == 200
        assert (await following)[0] == 400

    async with aiohttp.ClientSession() as session:
        service = Service(session)
        async with WeightPublisher(service, way=sender, bucket_bytes=16) as publisher:
            await service.told.put(give_up)
            await publisher.publish(tensors(), 1)
