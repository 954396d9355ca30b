"""What the fake server can do instead of answering well, and what it is like to be killed."""

from __future__ import annotations

import aiohttp
import pytest

from tests.support.client import outcome
from tests.support.fake_lmdeploy import Cut, FakeLMDeploy, Hang, Mangled, Raw, Reply, Reset, Status, Twice
from tests.support.faults import MANGLES
from tests.support.lmdeploy_client import LMDeployClient as Client

SESSION = 10**9


@pytest.mark.parametrize("handler_cancellation", [False, True])
async def test_faults_of_a_generation(handler_cancellation: bool) -> None:
    """Each fault is the fate of one call; only a reset leaves it running, unheard."""
    async with FakeLMDeploy(handler_cancellation=handler_cancellation) as engine, Client(engine) as client:
        for fate, answer in (
            (Status(500, b"boom"), (500, "boom")),
            (Raw(b"[1]"), (200, [1])),
        ):
            call = client.ask(SESSION)
            await engine.wait_running(1)
            engine.release(fate=fate)
            assert await call == answer
        call = client.ask(SESSION)
        await engine.wait_running(1)
        engine.release(fate=Cut())
        with pytest.raises(aiohttp.ClientPayloadError):
            await call
        call = client.ask(SESSION)
        await engine.wait_running(1)
        engine.release(fate=Reset())
        with pytest.raises(aiohttp.ClientConnectionError):
            await call
        assert engine.running == 1
        engine.release()
        assert engine.running == 0


@pytest.mark.parametrize("how", [how for how in MANGLES if how not in {"other rid", "completion_tokens wrong"}])
async def test_mangled_answers(how: str) -> None:
    """A mangled answer is a 200 that differs from a good one."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(tokens=4, finish="length")
        good = await client.ask(SESSION)
        engine.answer = lambda _: Mangled(how, Reply(tokens=4, finish="length"))
        status, body = await client.ask(SESSION)
        assert status == 200
        assert body != good[1]


async def test_twice() -> None:
    """The second copy of an answer is nobody's: the connection is not used again."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.answer = lambda _: Twice(Reply(tokens=2))
        assert (await client.ask(SESSION))[0] == 200


async def test_a_stream_that_is_cut() -> None:
    """What was advanced came; then the connection is reset."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        call = client.follow(SESSION)
        await engine.wait_running(1)
        engine.advance(engine.requests[0], 2)
        await client.wait_chunks(call, 1)
        engine.release(fate=Cut())
        with pytest.raises(aiohttp.ClientPayloadError):
            await call.events()
        assert [chunk["output_ids"] for chunk in call.chunks] == [[101, 102]]


async def test_an_error_in_a_stream() -> None:
    """After the head an error is an event, in the server's envelope, and `[DONE]` follows."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        call = client.follow(SESSION)
        await engine.wait_running(1)
        engine.release(fate=Status(500))
        error, done = await call.events()
        assert (error["error"]["code"], error["error"]["type"], done) == (500, "server_error", "[DONE]")


async def test_scripts() -> None:
    """A script strikes calls of its route in order, before they are accepted; healed, what hung goes on."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.script("/generate", Status(429), Hang())
        assert (await client.ask(SESSION))[0] == 429
        hung = client.ask(SESSION)
        await engine.wait_hits("/generate", 2)
        assert not engine.requests
        engine.answer = lambda _: Reply(tokens=1, finish="length")
        engine.heal()
        assert outcome(await hung) == (200, {"type": "length"}, 1)


async def test_a_deaf_call_keeps_its_handle() -> None:
    """It is not answered, not aborted, and those who wait go on waiting."""
    async with FakeLMDeploy(slots=1) as engine, Client(engine) as client:
        engine.answer = lambda call: Hang() if call.session_id == SESSION else None
        client.ask(SESSION)
        await engine.wait_running(1)
        client.ask(SESSION + 1)
        await engine.wait_requests(2)
        await client.abort_all()
        assert (engine.running, engine.waiting) == (1, 1)


async def test_restart() -> None:
    """Everything is lost: calls, sessions, sleep, weights; the port is the same, the process another."""
    async with FakeLMDeploy(max_concurrent=1) as engine, Client(engine) as client:
        url = engine.url
        call = client.ask(SESSION)
        await engine.wait_running(1)
        behind = client.abort_all()
        await engine.wait_hits("/abort_request", 1)
        engine.load(3)
        engine.sleep()
        await engine.restart()
        for lost in (call, behind):
            with pytest.raises(aiohttp.ClientConnectionError):
                await lost
        assert (engine.url, engine.weights, engine.live, engine.asleep) == (url, 0, {}, set())
        assert not engine.aborts
        engine.answer = lambda _: Reply(tokens=1, finish="length")
        assert outcome(await client.ask(SESSION)) == (200, {"type": "length"}, 1)


async def test_weights_are_the_tests_own_truth() -> None:
    """Each call knows what its tokens were made of, which the server never says."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        client.ask(SESSION)
        await engine.wait_running(1)
        [call] = engine.requests
        engine.advance(call, 4)
        engine.load(7)
        assert call.made_under == [(0, 0), (7, 4)]
