"""The faked control plane gives the recorded statuses, shapes and order."""

from __future__ import annotations

import asyncio

from tests.support.client import Client, outcome
from tests.support.fake_sglang import FakeSGLang, Reply

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
PAUSED = (200, {"message": "Generation paused successfully.", "status": "ok"})
CONTINUED = (200, {"message": "Generation continued successfully.", "status": "ok"})


async def test_pause_in_place() -> None:
    """`in_place` freezes: running aborts wait for the next step, queued ones go at once, blocked ones are lost."""
    async with FakeSGLang(slots=2) as engine, Client(engine) as client:
        engine.tokens_so_far = 15
        by_rid = {rid: client.generate(rid, max_new_tokens=60) for rid in ("place-0", "place-1", "place-2")}
        await engine.wait_requests(3)
        running = [call.rid for call in engine.calls("running")]
        queued = engine.calls("waiting")[0].rid
        assert await client.pause("in_place") == PAUSED
        late = client.generate("late", max_new_tokens=20)
        await engine.wait_requests(4)
        assert (engine.blocked, engine.frozen) == (1, 2)
        for rid in (running[0], queued, "late"):
            assert await client.abort(rid) == (200, None)
        assert outcome(await by_rid[queued]) == (200, ABORTED_IN_QUEUE, 0)
        assert (engine.running, engine.blocked) == (2, 1)
        assert (await client.get("/ping"))[0] == 200
        assert (await client.get("/ready"))[0] == 503
        assert await client.post("/flush_cache", None) == (400, "Flush cache failed.\n")
        await client.post("/update_weight_version", {"new_version": "v2", "abort_all_requests": False})
        assert await client.resume() == CONTINUED
        status, body = await by_rid[running[0]]
        assert outcome((status, body)) == (200, ABORTED, 15)
        assert body["meta_info"]["weight_version"] == "v2"
        await engine.wait_running(2)
        engine.release(finish="length")
        assert outcome(await late)[1:] == ({"type": "length", "length": 20}, 20)
        assert outcome(await by_rid[running[1]])[1:] == ({"type": "length", "length": 60}, 60)


async def test_pause_retract() -> None:
    """`retract` puts what runs back in the queue with its tokens: aborts are immediate and the cache can be flushed."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.tokens_so_far = 17
        calls = [client.generate(f"retract-{index}", max_new_tokens=60) for index in range(2)]
        await engine.wait_running(2)
        assert await client.pause("retract") == PAUSED
        assert (engine.running, engine.waiting, engine.frozen) == (0, 2, 2)
        await client.abort("retract-0")
        status, body = await calls[0]
        assert outcome((status, body)) == (200, ABORTED_IN_QUEUE, 17)
        assert "prompt_tokens" not in body["meta_info"]
        status, text = await client.post("/flush_cache", None)
        assert (status, text.splitlines()[0]) == (200, "Cache flushed.")
        assert await client.resume() == CONTINUED
        await engine.wait_running(1)
        engine.release(finish="length")
        assert outcome(await calls[1])[2] == 60


async def test_pause_abort() -> None:
    """`abort` ends all in flight before it answers; what arrives then waits at the door and runs on continue."""
    async with FakeSGLang(slots=2) as engine, Client(engine) as client:
        calls = [client.generate(f"ab{index}") for index in range(3)]
        await engine.wait_requests(3)
        assert await client.pause("abort") == PAUSED
        reasons = [outcome(await call)[1] for call in calls]
        assert sorted(reason["message"] for reason in reasons) == ["Abort in waiting queue", "Aborted", "Aborted"]
        late = client.generate("ab-late", max_new_tokens=5)
        await engine.wait_requests(4)
        assert (engine.running, engine.blocked) == (0, 1)
        assert await client.resume() == CONTINUED
        await engine.wait_running(1)
        engine.release(finish="length")
        assert outcome(await late)[2] == 5


async def test_the_later_of_two_pauses_holds() -> None:
    """Retracting frees the slots that `in_place` kept, aborts waiting there included; `in_place` gives none back."""
    async with FakeSGLang() as engine, Client(engine) as client:
        calls = [client.generate(f"two-{index}", max_new_tokens=60) for index in range(2)]
        await engine.wait_running(2)
        await client.pause("in_place")
        await client.abort("two-0")
        assert (engine.running, engine.frozen) == (2, 2)
        assert await client.pause("retract") == PAUSED
        assert outcome(await calls[0]) == (200, ABORTED_IN_QUEUE, 3)
        assert await client.pause("in_place") == PAUSED
        assert (engine.running, engine.waiting, engine.frozen) == (0, 1, 1)
        await client.abort("two-1")
        assert outcome(await calls[1]) == (200, ABORTED_IN_QUEUE, 3)
        assert await client.resume() == CONTINUED
        assert await client.resume() == CONTINUED
        assert (engine.frozen, engine.live) == (0, {})


async def test_pause_abort_of_a_frozen_engine() -> None:
    """It waits for what is frozen in place, which only a continue ends; what is retracted ends at once."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("r0")
        await engine.wait_running(1)
        await client.pause("in_place")
        pause = client.pause("abort")
        await engine.until(lambda: engine.live["r0"].abort_pending, "aborted in place")
        assert (pause.done(), call.done(), engine.frozen) == (False, False, 1)
        assert await client.resume() == CONTINUED
        assert await pause == PAUSED
        assert outcome(await call) == (200, ABORTED, 3)
        other = client.generate("r1")
        await engine.wait_running(1)
        await client.pause("retract")
        assert await client.pause("abort") == PAUSED
        assert outcome(await other) == (200, ABORTED_IN_QUEUE, 3)


async def test_updates_of_a_frozen_engine() -> None:
    """They are done at once; frozen generations go on with a span under each label, also through another freeze."""
    for mode in ("in_place", "retract"):
        async with FakeSGLang(report_spans=True, weight_version="1") as engine, Client(engine) as client:
            call = client.generate("r0", max_new_tokens=9)
            await engine.wait_running(1)
            engine.advance(engine.live["r0"], 2)
            await client.pause(mode)
            body = {"model_path": "/x", "weight_version": "2", "flush_cache": False}
            assert (await client.post("/update_weights_from_disk", body))[0] == 200
            await client.resume()
            engine.advance(engine.live["r0"], 3)
            await client.pause(mode)
            await client.post("/update_weight_version", {"new_version": "3", "abort_all_requests": False})
            await client.resume()
            engine.release("r0", finish="length")
            status, answer = await call
            assert (status, answer["meta_info"]["weight_versions"]) == (
                200,
                [
                    {"version": "1", "start": 0, "end": 2},
                    {"version": "2", "start": 2, "end": 5},
                    {"version": "3", "start": 5, "end": 9},
                ],
            )


async def test_pause_abort_waits_for_lost_aborts() -> None:
    """`/pause_generation` in mode abort is not answered while something still runs."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.lose_aborts = True
        call = client.generate("r0")
        await engine.wait_running(1)
        pause = client.pause("abort")
        await engine.until(lambda: engine.paused == "abort", "paused")
        assert not pause.done()
        engine.release("r0")
        assert await pause == PAUSED
        assert outcome(await call)[1]["type"] == "stop"


async def test_sticky_abort() -> None:
    """An abort by id lost at the door is never repeated: only `abort_all` reaches that call later."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.tokens_so_far = 24
        await client.pause("in_place")
        call = client.generate("sticky")
        await engine.wait_requests(1)
        await client.abort("sticky")
        await client.resume()
        await engine.wait_running(1)
        await client.abort("sticky")
        assert engine.running == 1
        await client.post("/abort_request", {"abort_all": True})
        assert outcome(await call) == (200, ABORTED, 24)


async def test_unpaused_update_is_a_writer() -> None:
    """A weight update of an engine that is not paused waits for what runs and holds back what arrives."""
    async with FakeSGLang() as engine, Client(engine) as client:
        running = client.generate("wl", max_new_tokens=150)
        await engine.wait_running(1)
        update = client.post("/update_weights_from_disk", {"model_path": "/x", "weight_version": "v9"})
        await engine.wait_hits("/update_weights_from_disk", 1)
        during = client.generate("wl2", max_new_tokens=5)
        await engine.wait_requests(2)
        assert engine.blocked == 1
        assert not update.done()
        engine.release("wl", finish="length")
        assert outcome(await running)[2] == 150
        message = "Succeeded to update model weights. Weight version updated to v9."
        assert await update == (200, {"success": True, "message": message, "num_paused_requests": 0})
        await engine.wait_running(1)
        engine.release(finish="length")
        status, body = await during
        assert (status, body["meta_info"]["weight_version"]) == (200, "v9")
        assert (await client.get("/model_info"))[1]["model_path"] == "/x"


async def test_update_that_aborts() -> None:
    """`abort_all_requests` ends what runs first; its answer has the old label."""
    async with FakeSGLang(weight_version="v9") as engine, Client(engine) as client:
        call = client.generate("wl3")
        await engine.wait_running(1)
        body = {"model_path": "/x", "weight_version": "v10", "abort_all_requests": True}
        assert (await client.post("/update_weights_from_disk", body))[0] == 200
        assert outcome(await call)[1] == ABORTED
        assert engine.weight_version == "v10"


async def test_update_weight_version_aborts_by_default() -> None:
    """Setting a label aborts everything unless told not to."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("wl4")
        await engine.wait_running(1)
        assert await client.post("/update_weight_version", {"new_version": "v11"}) == (
            200,
            {"success": True, "message": "Weight version updated to v11", "new_version": "v11"},
        )
        assert outcome(await call)[1] == ABORTED


async def test_tensor_updates_want_a_session() -> None:
    """Tensor updates are refused outside begin and end."""
    async with FakeSGLang() as engine, Client(engine) as client:
        refused = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        body = {"serialized_named_tensors": ["gAQu"]}
        assert await client.post("/update_weights_from_tensor", body) == (400, {"success": False, "message": refused})
        assert await client.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
        assert (await client.post("/begin_weight_update", {}))[0] == 400
        assert (await client.post("/update_weights_from_tensor", body))[0] == 200
        assert await client.post("/end_weight_update", {}) == (200, {"success": True, "message": "Success"})


async def test_health_in_a_pause_spoils_ping() -> None:
    """A `/health` during a pause fails, and `/ping` with it until the next good one."""
    async with FakeSGLang() as engine, Client(engine) as client:
        assert (await client.get("/health"))[0] == 200
        await client.pause("in_place")
        assert (await client.get("/ping"))[0] == 200
        assert (await client.get("/health"))[0] == 503
        assert (await client.get("/ping"))[0] == 503
        await client.resume()
        assert (await client.get("/ping"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/ping"))[0] == 200


async def test_keys() -> None:
    """With both keys each opens only its own routes; `/health` and `/ready` are open."""
    refused = (401, {"error": "Unauthorized"})
    async with FakeSGLang(api_key="k1", admin_key="adm") as engine:
        engine.answer = lambda _: Reply(tokens=1)
        async with Client(engine) as nobody, Client(engine, key="k1") as data, Client(engine, key="adm") as admin:
            for path in ("/health", "/ready"):
                assert (await nobody.get(path))[0] == 200
            for path in ("/ping", "/model_info", "/v1/models"):
                assert await nobody.get(path) == refused
            assert await nobody.generate("r") == refused
            assert await admin.generate("r") == refused
            assert (await data.generate("r"))[0] == 200
            assert await data.abort("r") == refused
            assert await data.post("/update_weight_version", {"new_version": "a"}) == refused
            assert await admin.abort("r") == (200, None)
            assert (await admin.post("/update_weight_version", {"new_version": "a"}))[0] == 200


async def test_one_key_opens_everything() -> None:
    """Without an admin key the data key controls."""
    async with FakeSGLang(api_key="k1") as engine, Client(engine, key="k1") as client:
        assert await client.abort("r") == (200, None)
        assert (await client.get("/ping"))[0] == 200


async def test_looks() -> None:
    """`/v1/loads`, `/server_info` and `/v1/models` say what the engine holds."""
    async with FakeSGLang(slots=1) as engine, Client(engine) as client:
        calls = [client.generate(f"r{index}") for index in range(2)]
        await engine.wait_requests(2)
        status, body = await client.get("/v1/loads")
        assert status == 200
        assert list(body) == ["timestamp", "version", "accelerator", "num_accelerators", "loads"]
        (rank,) = body["loads"]
        assert (rank["dp_rank"], rank["num_running_reqs"], rank["num_waiting_reqs"]) == (0, 1, 1)
        assert rank["max_running_requests"] == 1
        engine.loads = (7, 5)
        _, body = await client.get("/v1/loads")
        assert (body["loads"][0]["num_running_reqs"], body["loads"][0]["num_waiting_reqs"]) == (7, 5)
        assert (await client.get("/server_info"))[1]["version"] == "0.5.23"
        assert (await client.get("/v1/models"))[1]["data"][0]["id"] == "tiny-model"
        engine.release()
        await asyncio.gather(*calls)
