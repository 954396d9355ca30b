"""The fake vLLM pauses, loads weights and counts as vLLM 0.32 was recorded to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_vllm import FakeVLLM, Reply
from tests.support.vllm_client import VLLMClient, outcome


def span(version: str, start: int, end: int) -> dict[str, Any]:
    """One stretch of tokens."""
    return {"version": version, "start": start, "end": end}


async def test_pause_that_aborts() -> None:
    """Running and queued end; what comes then waits in the engine and runs on resume."""
    async with FakeVLLM(slots=2) as engine, VLLMClient(engine) as client:
        calls = [client.ask(f"a{n}") for n in range(4)]
        await engine.wait_requests(4)
        assert await client.freeze("mode=abort") == (200, {"status": "paused"})
        assert [outcome(await call)[1:3] for call in calls] == [("abort", 3)] * 2 + [("abort", 0)] * 2
        late = client.ask("new")
        await engine.wait_requests(5)
        assert (await client.get("/is_paused"), await client.gauges()) == ((200, {"is_paused": True}), (0, 0))
        assert (await client.get("/health"))[0] == 200
        assert await client.thaw() == (200, {"status": "resumed"})
        engine.release("new", tokens=20, finish="length")
        assert outcome(await late) == (200, "length", 20, [span("default", 0, 20)])


async def test_pause_that_waits() -> None:
    """It returns when what runs is done; what is queued stays queued until resume."""
    async with FakeVLLM(slots=2) as engine, VLLMClient(engine) as client:
        calls = [client.ask(f"w{n}") for n in range(4)]
        await engine.wait_requests(4)
        pausing = client.freeze("mode=wait")
        await engine.until(lambda: engine.paused == "wait", "paused")
        late = client.ask("new")
        await engine.wait_requests(5)
        assert await client.get("/is_paused") == (200, {"is_paused": True})
        assert not pausing.done()
        for call in engine.calls("running"):
            engine.release(call, tokens=5)
        assert await pausing == (200, {"status": "paused"})
        assert [call.done() for call in calls] == [True, True, False, False]
        assert await client.gauges() == (0, 3)
        engine.answer = lambda _: Reply()
        await client.thaw()
        assert [outcome(await call)[0] for call in [*calls, late]] == [200] * 5


async def test_pause_that_keeps() -> None:
    """Everything freezes and goes on; one answer spans two versions; what started later has the new one."""
    async with FakeVLLM(slots=1) as engine, VLLMClient(engine) as client:
        calls = [client.ask(f"k{n}") for n in range(3)]
        await engine.wait_requests(3)
        engine.advance(engine.call("k0"), 1197)
        assert await client.freeze("mode=keep&clear_cache=false") == (200, {"status": "paused"})
        answer = await client.post("/update_weight_version", {"new_version": "v-mid"})
        assert answer == (200, {"success": True, "new_version": "v-mid"})
        await client.abort_ids("generate-tokens-k2")
        assert outcome(await calls[2]) == (200, "abort", 0, [])
        assert (engine.frozen, engine.preemptions) == (1, 0)
        await client.thaw()
        engine.release("k0", tokens=1500, finish="length")
        assert outcome(await calls[0])[3] == [span("default", 0, 1197), span("v-mid", 1197, 1500)]
        engine.release("k1", tokens=7)
        assert outcome(await calls[1])[3] == [span("v-mid", 0, 7)]


async def test_keep_drops_the_cache_unless_told_not_to() -> None:
    """By default what runs is preempted: it waits without its cache, and runs first on resume."""
    async with FakeVLLM(slots=1) as engine, VLLMClient(engine) as client:
        first, second = client.ask("x1"), client.ask("x2")
        await engine.wait_requests(2)
        engine.advance(engine.call("x1"), 5)
        await client.freeze("mode=keep")
        assert (engine.running, engine.preemptions, engine.frozen) == (0, 1, 1)
        await client.thaw()
        assert engine.call("x1").state == "running"
        engine.release("x1", tokens=8)
        assert outcome(await first)[2] == 8
        engine.release("x2")
        assert outcome(await second)[1] == "stop"


async def test_aborts_reach_what_is_frozen() -> None:
    """Frozen, queued and newly arrived all end at once; the engine stays paused."""
    async with FakeVLLM(slots=2) as engine, VLLMClient(engine) as client:
        calls = [client.ask(f"z{n}") for n in range(3)]
        await engine.wait_requests(3)
        await client.freeze()
        calls.append(client.ask("znew"))
        await engine.wait_requests(4)
        await client.post("/abort_requests", {})
        assert [outcome(await call)[1:3] for call in calls] == [("abort", 3), ("abort", 3), ("abort", 0), ("abort", 0)]
        assert await client.get("/is_paused") == (200, {"is_paused": True})


async def test_pausing_and_resuming_twice() -> None:
    """Any order is 200; a mode it does not know is 400."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        for query in ("mode=keep", "mode=abort", "mode=wait"):
            assert await client.freeze(query) == (200, {"status": "paused"})
        for _ in range(2):
            assert await client.thaw() == (200, {"status": "resumed"})
        status, body = await client.freeze("mode=bogus")
        assert (status, body["error"]["param"]) == (400, "query.mode")
        assert "'abort', 'wait' or 'keep'" in body["error"]["message"]
        assert engine.paused is None


async def test_gauges_freeze() -> None:
    """While paused they tell what the last step told; an abort, and going on, make them true."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        for name in ("a", "b"):
            client.ask(name)
        await engine.wait_running(2)
        assert await client.gauges() == (2, 0)
        await client.freeze("mode=keep&clear_cache=false")
        client.ask("new")
        await engine.wait_requests(3)
        assert await client.gauges() == (2, 0)
        await client.abort_ids("generate-tokens-a", "generate-tokens-b")
        assert await client.gauges() == (0, 1)
        await client.thaw()
        assert await client.gauges() == (1, 0)


async def test_no_gauges_without_stats() -> None:
    """`--disable-log-stats` leaves `/metrics` without them."""
    async with FakeVLLM(log_stats=False) as engine, VLLMClient(engine) as client:
        status, text = await client.get("/metrics")
        assert (status, text) == (200, None)


# -- weights ---------------------------------------------------------------------------------------------------

RELOAD = {"method": "reload_weights", "kwargs": {"weights_path": "tiny-model-b"}}


async def test_weights_from_disk() -> None:
    """Loading and labelling are two calls; loading leaves cached prefixes, which the next generation reads."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.answer = lambda _: Reply()
        await client.ask("before")
        assert await client.post("/collective_rpc", RELOAD) == (200, {"results": [None]})
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        await client.ask("stale")
        assert engine.stale_reads == 1
        assert await client.post("/reset_prefix_cache", None) == (200, {"success": True})
        await client.post("/update_weight_version", {"new_version": "7"})
        assert outcome(await client.ask("after"))[3] == [span("7", 0, 4)]
        assert engine.stale_reads == 1


async def test_a_cache_in_use_is_not_reset() -> None:
    """200 and `success: false` while something runs or is frozen, unless it may be preempted."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        client.ask("a")
        await engine.wait_running(1)
        assert await client.post("/reset_prefix_cache", None) == (200, {"success": False})
        await client.freeze("mode=keep&clear_cache=false")
        assert await client.post("/reset_prefix_cache", None) == (200, {"success": False})
        answer = await client.post("/reset_prefix_cache?reset_running_requests=true", None)
        assert (answer, engine.preemptions, engine.running) == ((200, {"success": True}), 1, 0)


async def test_a_failed_update_is_healed_by_a_good_one() -> None:
    """As long as nothing was generated in between."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.answer = lambda _: Reply()
        engine.fail_update = True
        await client.post("/collective_rpc", RELOAD)
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        engine.fail_update = False
        assert await client.post("/collective_rpc", RELOAD) == (200, {"results": [None]})
        assert ((await client.ask("next"))[0], engine.dead) == (200, False)


async def test_a_failed_update_poisons() -> None:
    """500 that names the trouble, healthy all the same; the next generation kills the core."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.fail_update = True
        status, body = await client.post("/collective_rpc", RELOAD)
        assert status == 500
        assert body["error"]["message"].startswith(
            "Call to collective_rpc method failed: Worker failed with error 'Repo id must use alphanumeric chars"
        )
        assert (await client.get("/health"))[0] == 200
        assert (await client.ask("next"))[0] == 500
        assert engine.dead
        await engine.restart()
        assert (engine.dead, engine.poisoned, engine.weight_version) == (False, False, "default")


@pytest.mark.parametrize("label", [3, None, ["3"]])
async def test_a_label_is_a_string(label: object) -> None:
    """Anything else is 400."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        status, body = await client.post("/update_weight_version", {"new_version": label})
        assert (status, body["error"]["param"]) == (400, "body.new_version")
        assert engine.weight_version == "default"


async def test_bad_rpc() -> None:
    """No method, and a method that is not there."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        status, body = await client.post("/collective_rpc", {})
        assert (status, body["error"]["message"]) == (400, "Missing 'method' in request body")
        assert (await client.post("/collective_rpc", {"method": "bogus"}))[0] == 500
