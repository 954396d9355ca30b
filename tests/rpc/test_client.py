"""The clients against a hand-written service that records what it was sent and answers what it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from rollout_svc.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    NotFound,
    NotNow,
    ServiceError,
    Unauthorized,
    Unreachable,
)
from rollout_svc.rpc import client as client_module
from rollout_svc.rpc.blocking import SyncRolloutClient
from rollout_svc.rpc.client import RolloutClient
from tests.rpc.stub_service import Stub, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    stub = Stub()
    runner = await serve(stub)
    yield stub
    await runner.cleanup()


@pytest.fixture
def stub_in_thread() -> Iterator[Stub]:
    """A stub in a loop of its own, for callers that block theirs."""
    stub, loop, up = Stub(), asyncio.new_event_loop(), threading.Event()

    def run() -> None:
        runner = loop.run_until_complete(serve(stub))
        up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert up.wait(10)
    yield stub
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


async def test_every_call_is_spelled_as_in_the_contract(stub: Stub) -> None:
    """Each method is one HTTP call with exactly the body of the contract; what is not given is not sent."""
    async with RolloutClient(stub.url + "/", token="secret") as client:
        await client.status()
        await client.stuck()
        await client.pause()
        await client.pause(mode="abort", deadline_s=2.5, lanes=("train",), if_ticket=3, kv="keep", offload=["kv"])
        await client.resume()
        await client.resume(4, weight_version=7)
        await client.take_batch(5, 2, timeout_s=1.5)
        await client.ack("b/1")
        await client.put_prompts("sort", [{"input_ids": [1]}])
        await client.checkpoint("/s.db", 6)
        await client.checkpoint("/s.db", 6, ack=["b1"])
        await client.evaluate("sort", [{"input_ids": [1]}], sampling={"top_k": 1}, version=2, timeout_s=3)
        await client.update_weights(8, {"kind": "disk", "path": "/w"}, pause={"deadline_s": 1})
        await client.update_weights(9, {"kind": "external"})
        await client.concurrency()
        await client.set_concurrency(trainer={"train_batch_size": 4})
        await client.set_concurrency(limits={"w0": 3})
        await client.workers()
        await client.add_worker("http://127.0.0.1:1", max_batch=8)
        await client.remove_worker("w0")
    assert stub.calls == [
        ("GET", "/v1/status", None),
        ("GET", "/v1/stuck", None),
        ("POST", "/v1/pause", {}),
        (
            "POST",
            "/v1/pause",
            {"mode": "abort", "deadline_s": 2.5, "lanes": ["train"], "if_ticket": 3, "kv": "keep", "offload": ["kv"]},
        ),
        ("POST", "/v1/resume", {}),
        ("POST", "/v1/resume", {"ticket": 4, "weight_version": 7}),
        ("POST", "/v1/batches", {"step": 5, "groups": 2, "timeout_s": 1.5}),
        ("POST", "/v1/batches/b/1/ack", {}),
        ("POST", "/v1/prompts", {"task": "sort", "prompts": [{"input_ids": [1]}]}),
        ("POST", "/v1/checkpoints", {"path": "/s.db", "step": 6, "ack": ["b1"]}),
        ("POST", "/v1/checkpoints", {"path": "/s.db", "step": 6, "ack": ["b1"]}),
        (
            "POST",
            "/v1/evaluations",
            {"task": "sort", "prompts": [{"input_ids": [1]}], "sampling": {"top_k": 1}, "version": 2, "timeout_s": 3},
        ),
        ("POST", "/v1/weights", {"version": 8, "source": {"kind": "disk", "path": "/w"}, "pause": {"deadline_s": 1}}),
        ("POST", "/v1/weights", {"version": 9, "source": {"kind": "external"}}),
        ("GET", "/v1/concurrency", None),
        ("PUT", "/v1/concurrency", {"trainer": {"train_batch_size": 4}}),
        ("PUT", "/v1/concurrency", {"limits": {"w0": 3}}),
        ("GET", "/v1/workers", None),
        ("POST", "/v1/workers", {"url": "http://127.0.0.1:1", "max_batch": 8}),
        ("DELETE", "/v1/workers/w0", None),
    ]
    assert {headers["Authorization"] for headers in stub.headers} == {"Bearer secret"}


async def test_the_previous_batch_is_acked_with_the_next_take(stub: Stub) -> None:
    """One take acknowledges the batch before it; the last one stays the caller's."""
    async with RolloutClient(stub.url) as client:
        for step in range(3):
            await client.take_batch(step, 1)
        assert client.unacked == "b3"
    assert [body.get("ack") for body in stub.bodies("/v1/batches")] == [None, ["b1"], ["b2"]]


async def test_a_checkpoint_acks_what_is_in_its_weights(stub: Stub) -> None:
    """A batch of an earlier step is acknowledged with the checkpoint, once; one of the same step is not."""
    async with RolloutClient(stub.url) as client:
        await client.take_batch(3, 1)
        await client.checkpoint("/s.db", 3)
        stub.refuse("/v1/checkpoints", 503, "checkpoint_failed")
        with pytest.raises(NotNow):
            await client.checkpoint("/s.db", 4)
        del stub.answers["/v1/checkpoints"]
        await client.checkpoint("/s.db", 4)
        unacked = [client.unacked]
        await client.checkpoint("/s.db", 5)
        await client.take_batch(5, 1)
        await client.checkpoint("/s.db", 6, ack=None)
        unacked.append(client.unacked)
    assert unacked == [None, "b2"]
    assert [body.get("ack") for body in stub.bodies("/v1/checkpoints")] == [None, ["b1"], ["b1"], None, None]


async def test_a_take_that_fails_acks_nothing_for_good(stub: Stub) -> None:
    """After a 503 the next take still carries the batch that was to be acknowledged."""
    async with RolloutClient(stub.url) as client:
        await client.take_batch(0, 1)
        stub.refuse("/v1/batches", 503, "not_enough")
        with pytest.raises(NotNow):
            await client.take_batch(1, 1)
        del stub.answers["/v1/batches"]
        await client.take_batch(1, 1)
    assert [body.get("ack") for body in stub.bodies("/v1/batches")] == [None, ["b1"], ["b1"]]


async def test_the_same_step_again_is_no_ack(stub: Stub) -> None:
    """Asking for a step's batch once more does not acknowledge it: it would be lost."""
    async with RolloutClient(stub.url) as client:
        await client.take_batch(4, 1)
        await client.take_batch(4, 1)
    assert [body.get("ack") for body in stub.bodies("/v1/batches")] == [None, None]


async def test_told_what_to_ack_it_obeys(stub: Stub) -> None:
    """A list is sent as it is; None sends nothing; an explicit ack is not repeated."""
    async with RolloutClient(stub.url) as client:
        await client.take_batch(0, 1)
        await client.take_batch(1, 1, ack=None)
        await client.take_batch(2, 1, ack=["b1", "b2"])
        await client.ack("b3")
        assert client.unacked is None
        await client.take_batch(3, 1)
    assert [body.get("ack") for body in stub.bodies("/v1/batches")] == [None, None, ["b1", "b2"], None]


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "bad_request", BadRequest),
        (401, "unauthorized", Unauthorized),
        (404, "not_found", NotFound),
        (409, "conflict", Conflict),
        (413, "too_large", BadRequest),
        (500, "internal", ServiceError),
    ],
)
async def test_an_error_body_becomes_its_exception(
    stub: Stub, status: int, kind: str, error: type[ServiceError]
) -> None:
    """Type, message and detail survive the wire, in the class of the status."""
    stub.refuse("/v1/pause", status, kind, detail=[{"path": "lanes.0", "message": "no such lane"}])
    async with RolloutClient(stub.url) as client:
        with pytest.raises(error) as caught:
            await client.pause()
    assert type(caught.value) is error
    assert (caught.value.type, caught.value.message) == (kind, f"because {kind}")
    assert caught.value.detail == [{"path": "lanes.0", "message": "no such lane"}]


@pytest.mark.parametrize(("header", "seconds"), [("2.5", 2.5), ("0", 0.0), (None, 1.0), ("Fri, 1 Jan 2027", 1.0)])
async def test_not_now_says_why_and_when(stub: Stub, header: str | None, seconds: float) -> None:
    """503 carries its type and `Retry-After`."""
    headers = {} if header is None else {"Retry-After": header}
    stub.refuse("/v1/batches", 503, "exhausted", **headers)
    async with RolloutClient(stub.url) as client:
        with pytest.raises(NotNow) as caught:
            await client.take_batch(0, 1)
    assert (caught.value.type, caught.value.retry_after_s) == ("exhausted", seconds)


@pytest.mark.parametrize("status", [200, 502])
async def test_what_is_not_our_json_is_a_clear_error(stub: Stub, status: int) -> None:
    """A page of some proxy is quoted, not decoded."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>bad\n gateway</html>", status=status)

    stub.answers["/v1/status"] = page
    async with RolloutClient(stub.url) as client:
        with pytest.raises(ServiceError, match=r"GET /v1/status.*<html>bad gateway"):
            await client.status()


@pytest.mark.parametrize("status", [201, 202])
async def test_every_success_is_an_answer(stub: Stub, status: int) -> None:
    """Adding a worker is answered with 201, removing one with 202."""

    async def accepted(_: web.Request) -> web.Response:
        return web.json_response({"id": "w7"}, status=status)

    stub.answers["/v1/workers"] = accepted
    async with RolloutClient(stub.url) as client:
        assert await client.add_worker("http://127.0.0.1:1") == {"id": "w7"}


async def test_nobody_there_is_unreachable() -> None:
    """A refused connection names the address; `ready` is just False."""
    async with RolloutClient("http://127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match=r"no rollout service at http://127\.0\.0\.1:1"):
            await client.status()
        assert await client.ready() is False


async def test_a_connection_lost_is_unreachable(stub: Stub) -> None:
    """The service dying under a call is one error of ours."""

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    stub.answers["/v1/status"] = die
    async with RolloutClient(stub.url) as client:
        with pytest.raises(Unreachable, match="gave no answer to GET /v1/status"):
            await client.status()


async def test_a_silent_service_is_given_up_after_the_calls_own_time(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a take is what it grants the service, and the margin."""
    monkeypatch.setattr(client_module, "MARGIN_S", 0.05)
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.json_response({})

    stub.answers["/v1/batches"] = hang
    async with RolloutClient(stub.url) as client:
        with pytest.raises(Unreachable, match=r"within 0\.1 s"):
            await client.take_batch(0, 1, timeout_s=0.05)
    released.set()


async def test_a_pause_does_not_queue_behind_takes(stub: Stub) -> None:
    """However many takes wait, a pause is sent at once."""
    released = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await released.wait()
        return web.json_response({"batch_id": "b"})

    stub.answers["/v1/batches"] = wait
    async with RolloutClient(stub.url) as client:
        takes = [asyncio.create_task(client.take_batch(step, 1)) for step in range(120)]
        await client.pause()
        assert not any(take.done() for take in takes)
        released.set()
        await asyncio.gather(*takes)


async def test_ready_follows_the_probe(stub: Stub) -> None:
    """200, with whatever body, is ready; 503 is not."""
    async with RolloutClient(stub.url) as client:
        assert await client.ready() is True
        stub.refuse("/readyz", 503, "starting")
        assert await client.ready() is False


async def test_cancelling_a_call_propagates(stub: Stub) -> None:
    """A cancelled take ends as cancelled, and acknowledges nothing."""
    entered = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        entered.set()
        await asyncio.Event().wait()
        return web.json_response({})

    stub.answers["/v1/batches"] = hang
    async with RolloutClient(stub.url) as client:
        take = asyncio.create_task(client.take_batch(0, 1))
        await entered.wait()
        take.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take
        assert take.cancelled()
        assert client.unacked is None


async def test_a_closed_client_may_be_used_again(stub: Stub) -> None:
    """`close` is idempotent, safe before the first call, and not the end."""
    client = RolloutClient(stub.url)
    await client.close()
    await client.status()
    await client.close()
    await client.close()
    await client.status()
    await client.close()


def test_the_blocking_client_serves_many_threads(stub_in_thread: Stub) -> None:
    """Calls of several threads share one loop and one connection pool."""
    with SyncRolloutClient(stub_in_thread.url) as client:
        threads = [threading.Thread(target=client.put_prompts, args=("sort", [{"id": str(n)}])) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    sent = {body["prompts"][0]["id"] for body in stub_in_thread.bodies("/v1/prompts")}
    assert sent == {str(n) for n in range(16)}


async def test_the_blocking_client_works_inside_a_running_loop(stub_in_thread: Stub) -> None:
    """A notebook has a running loop; the blocking client does not mind."""
    with SyncRolloutClient(stub_in_thread.url) as client:
        client.take_batch(0, 1)
        client.take_batch(1, 1)
        assert client.unacked == "b2"
    assert stub_in_thread.bodies("/v1/batches")[1]["ack"] == ["b1"]


def test_the_blocking_client_has_every_method(stub_in_thread: Stub) -> None:
    """The two clients differ in waiting only."""
    with SyncRolloutClient(stub_in_thread.url) as client:
        assert client.ready() is True
        client.status()
        client.stuck(1.5)
        client.pause(deadline_s=1)
        client.resume(1, weight_version=2)
        client.ack("b1")
        client.evaluate("sort", [], timeout_s=1)
        client.update_weights(1, {"kind": "external"}, pause={})
        client.concurrency()
        client.set_concurrency(limits={"w0": 1})
        client.workers()
        client.add_worker("http://127.0.0.1:1")
        client.remove_worker("w0")
    public = {name for name in vars(RolloutClient) if not name.startswith("_")}
    assert public <= set(vars(SyncRolloutClient))
    assert len(stub_in_thread.calls) == 13


def test_the_blocking_client_raises_as_the_async_one(stub_in_thread: Stub) -> None:
    """Errors cross the thread with their class."""
    stub_in_thread.refuse("/v1/resume", 409, "conflict")
    with SyncRolloutClient(stub_in_thread.url) as client, pytest.raises(Conflict):
        client.resume(1)


def test_closing_the_blocking_client_ends_its_thread(stub_in_thread: Stub) -> None:
    """Closing is idempotent, safe before the first call, and leaves no thread; the client may be used again."""
    client = SyncRolloutClient(stub_in_thread.url)
    client.close()
    for _ in range(2):
        client.status()
        client.close()
        client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-client"]


def test_closing_fails_calls_that_still_wait(stub_in_thread: Stub) -> None:
    """A thread inside a call is not left waiting by `close` in another."""
    entered = threading.Event()
    outcome: list[BaseException] = []

    async def hang(_: web.Request) -> web.Response:
        entered.set()
        await asyncio.sleep(30)
        return web.json_response({})

    stub_in_thread.answers["/v1/batches"] = hang
    client = SyncRolloutClient(stub_in_thread.url)

    def take() -> None:
        try:
            client.take_batch(0, 1)
        except BaseException as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert entered.wait(10)
    client.close()
    thread.join(10)
    assert len(outcome) == 1


def test_the_client_loads_no_torch() -> None:
    """A trainer's control process pays for aiohttp only."""
    code = "import sys, rollout_svc.rpc.client; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://127.0.0.1:8700", "", "http://127.0.0.1:99999"])
async def test_an_address_that_is_none_is_a_bad_setting(url: str) -> None:
    """Not an answer that did not come: nobody was asked."""
    async with RolloutClient(url) as client:
        with pytest.raises(ConfigError, match=r"url: expected http://HOST\[:PORT\]"):
            await client.status()


@pytest.mark.parametrize("token", ["secret\n", "a\rb", "a\0b"])
def test_a_token_that_no_header_can_have_is_refused(token: str) -> None:
    """Read from a file, with the end of its line; what it is is not told."""
    with pytest.raises(ConfigError, match="token: a token is one line"):
        RolloutClient("http://127.0.0.1:8700", token)
