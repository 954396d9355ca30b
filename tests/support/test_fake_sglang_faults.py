"""Every misdeed of the fake engine, as a client meets it, and what the engine holds afterwards."""

from __future__ import annotations

import asyncio
import json
import math

import aiohttp
import pytest

from tests.support.client import Client, outcome
from tests.support.fake_sglang import Cut, FakeSGLang, Hang, Mangled, Raw, Reply, Reset, Status, Twice
from tests.support.faults import MANGLES, RUBBISH

PROMPT = {"input_ids": [1, 2, 3], "return_logprob": True}


@pytest.mark.parametrize("code", [401, 403, 404, 409, 413, 422, 429, 500, 503, 529])
async def test_statuses(code: int) -> None:
    """A scripted status strikes once, before acceptance; a status as a fate ends an accepted generation."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.script("/generate", Status(code, {"error": "no"}, {"Retry-After": "1"}))
        assert await client.generate("r0") == (code, {"error": "no"})
        assert engine.requests == []
        engine.answer = lambda _: Status(code)
        assert (await client.generate("r1"))[0] == code
        assert [call.rid for call in engine.requests] == ["r1"]
        assert not engine.live


async def test_headers_of_a_status() -> None:
    """`Retry-After` arrives."""
    async with FakeSGLang() as engine, aiohttp.ClientSession() as session:
        engine.script("/generate", Status(429, headers={"Retry-After": "7"}))
        async with session.post(engine.url + "/generate", json=PROMPT) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")


async def test_a_script_runs_in_order_and_can_be_healed() -> None:
    """Refusals come one after the other, `times=None` for ever, until `heal`."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.script("/ping", Status(500), Status(503), times=2)
        engine.script("/ping", Status(529), times=None)
        assert [(await client.get("/ping"))[0] for _ in range(6)] == [500, 500, 503, 503, 529, 529]
        engine.heal("/ping")
        assert (await client.get("/ping"))[0] == 200
        assert engine.count("/ping") == 7


async def test_reset_before_and_after_acceptance() -> None:
    """Before: nothing was accepted. After: the generation runs on, unheard, until an abort or a release."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.script("/generate", Reset())
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.generate("r0")
        assert engine.requests == []
        engine.heal()
        engine.answer = lambda _: Reset()
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.generate("r1")
        assert engine.running == 1
        assert (await client.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 1
        await client.abort("r1")
        assert engine.running == 0


async def test_cut_in_the_body() -> None:
    """A body cut in the middle is a payload error, and the generation is over."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Cut()
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.generate("r0")
        assert not engine.live


@pytest.mark.parametrize("how", MANGLES)
async def test_mangled_answers_differ_from_good_ones(how: str) -> None:
    """Every mangle changes the answer, and it is still a 200 with JSON."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply()
        good = await client.generate("r0")
        engine.answer = lambda _: Mangled(how)
        bad = await client.generate("r0")
        assert bad[0] == 200
        assert json.dumps(bad[1]) != json.dumps(good[1])


async def test_nan_is_written_as_nan() -> None:
    """A NaN logprob travels as the bare word, which strict parsers refuse."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Mangled("logprob is NaN")
        _, body = await client.generate("r0")
        assert math.isnan(body["meta_info"]["output_token_logprobs"][0][0])


@pytest.mark.parametrize("name", [name for name, fault in RUBBISH.items() if isinstance(fault, Raw)])
async def test_raw_bytes(name: str) -> None:
    """Bytes that are no answer arrive as they are, with status 200."""
    async with FakeSGLang() as engine, aiohttp.ClientSession() as session:
        fault = RUBBISH[name]
        assert isinstance(fault, Raw)
        engine.answer = lambda _: fault
        async with session.post(engine.url + "/generate", json=PROMPT) as response:
            assert (response.status, await response.read()) == (200, fault.body)


async def test_an_answer_sent_twice_reaches_the_client_once() -> None:
    """The second copy does not become the answer of the next request."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda call: Twice() if call.rid == "r0" else Reply(tokens=2)
        assert (await client.generate("r0"))[1]["meta_info"]["id"] == "r0"
        assert (await client.generate("r1"))[1]["meta_info"]["id"] == "r1"


async def test_a_black_hole_answers_when_it_is_released() -> None:
    """A hanging generation is deaf to aborts, counts as running, and answers after all when released."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Hang()
        call = client.generate("r0")
        await engine.wait_running(1)
        await client.post("/abort_request", {"abort_all": True})
        assert engine.running == 1
        engine.release("r0", tokens=2)
        assert outcome(await call) == (200, {"type": "stop", "matched": 102}, 2)


async def test_a_hanging_route_goes_on_when_healed() -> None:
    """A control call that hangs is recorded, does nothing, and takes effect late when healed."""
    async with FakeSGLang() as engine, Client(engine) as client:
        for path in ("/v1/loads", "/abort_request"):
            engine.script(path, Hang())
        call = client.generate("r0")
        await engine.wait_running(1)
        loads, abort = client.get("/v1/loads"), client.abort("r0")
        await engine.wait_hits("/abort_request", 1)
        await engine.wait_hits("/v1/loads", 1)
        assert (engine.aborts, engine.running, loads.done(), abort.done()) == ([], 1, False, False)
        engine.heal()
        assert await abort == (200, None)
        assert (await loads)[0] == 200
        assert outcome(await call)[1]["type"] == "abort"


async def test_lost_aborts() -> None:
    """A lost abort is a 200 that does nothing; by a rule, only for some."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.lose_aborts = lambda call: call.rid == "deaf"
        deaf, heard = client.generate("deaf"), client.generate("heard")
        await engine.wait_running(2)
        await client.post("/abort_request", {"abort_all": True})
        assert outcome(await heard)[1]["type"] == "abort"
        assert engine.running == 1
        engine.release("deaf", tokens=6)
        assert outcome(await deaf)[1]["type"] == "stop"


async def test_held_aborts() -> None:
    """A held abort is answered at once and takes effect later, unless the generation ended before."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.hold_aborts = True
        calls = [client.generate(rid) for rid in ("a", "b")]
        await engine.wait_running(2)
        assert await client.post("/abort_request", {"abort_all": True}) == (200, None)
        assert engine.running == 2
        engine.release("a")
        assert engine.settle_aborts() == 1
        assert [outcome(await call)[1]["type"] for call in calls] == ["stop", "abort"]


async def test_failing_update() -> None:
    """A failing update answers 400 and changes nothing."""
    async with FakeSGLang(weight_version="1") as engine, Client(engine) as client:
        engine.fail_update = True
        status, body = await client.post("/update_weights_from_disk", {"model_path": "/x", "weight_version": "2"})
        assert (status, body["success"]) == (400, False)
        assert (engine.weight_version, engine.model_path) == ("1", "tiny-model")
        assert len(engine.updates) == 1


async def test_refused_connections() -> None:
    """With the listener closed new connections are refused, open ones live, and the port comes back."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("r0")
        await engine.wait_running(1)
        await engine.refuse()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        engine.release("r0")
        assert (await call)[0] == 200
        await engine.listen()
        assert (await client.get("/ping"))[0] == 200


async def test_restart() -> None:
    """A restart loses what was in flight and comes back on the same port, idle, with the label `default`."""
    async with FakeSGLang(weight_version="7") as engine, Client(engine) as client:
        await client.pause("in_place")
        held, port = client.generate("r0"), engine.port
        await engine.wait_requests(1)
        await engine.restart()
        with pytest.raises(aiohttp.ClientConnectionError):
            await held
        assert (engine.port, engine.restarts, engine.paused, engine.live) == (port, 1, None, {})
        assert (await client.get("/model_info"))[1]["weight_version"] == "default"


async def test_a_rule_may_answer_thousands_through_one_slot() -> None:
    """Queued calls that a rule answers at once do not nest."""
    async with FakeSGLang(slots=1) as engine, Client(engine) as client:
        first = client.generate("first")
        await engine.wait_running(1)
        rest = [client.generate(f"r{index}") for index in range(1200)]
        await engine.wait_requests(1201)
        engine.answer = lambda _: Reply(tokens=1)
        engine.release("first")
        assert {answer[0] for answer in await asyncio.gather(first, *rest)} == {200}
        assert engine.max_running == 1


async def test_waiting_in_vain_says_what_is_there() -> None:
    """A waiter fails with what the engine holds."""
    async with FakeSGLang() as engine, Client(engine) as client:
        client.generate("r0")
        await engine.wait_running(1)
        with pytest.raises(AssertionError, match="<Call r0 running tokens=0>"):
            await engine.until(lambda: False, "never", timeout_s=0.0)


async def test_disconnect() -> None:
    """A client that leaves is noticed at once with handler cancellation, else by the engine's poll."""
    for cancels in (False, True):
        async with FakeSGLang(handler_cancellation=cancels) as engine, Client(engine) as client:
            call = client.generate("r0")
            await engine.wait_running(1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            if not cancels:
                other = await client.get("/ping")  # the engine has had its chance to notice
                assert other[0] == 200
                assert engine.running == 1
                assert await client.generate("r0") == (
                    400,
                    {"error": {"message": "Duplicate request ID detected: r0"}},
                )
                assert engine.notice_disconnects() == 1
            await engine.wait_idle()


async def test_weight_spans() -> None:
    """A call that lived through a label change reports both labels, by token."""
    async with FakeSGLang(report_spans=True) as engine, Client(engine) as client:
        call = client.generate("r0")
        await engine.wait_running(1)
        engine.advance(engine.live["r0"], 5)
        engine.set_version("2")
        engine.release("r0", tokens=9)
        _, body = await call
        assert body["meta_info"]["weight_version"] == "2"
        assert body["meta_info"]["weight_versions"] == [
            {"version": "default", "start": 0, "end": 5},
            {"version": "2", "start": 5, "end": 9},
        ]


async def test_nothing_answers_twice() -> None:
    """A released call is over: a later abort finds nothing."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("r0")
        await engine.wait_running(1)
        assert engine.release("r0") == 1
        assert outcome(await call)[1]["type"] == "stop"
        await client.abort("r0")
        assert engine.release() == 0
        assert engine.max_running == 1
