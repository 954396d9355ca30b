"""The fake server gives the recorded statuses, shapes and order of LMDeploy 0.16."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import aiohttp
import pytest

from tests.support.client import outcome
from tests.support.fake_lmdeploy import FakeLMDeploy, Reply
from tests.support.lmdeploy_client import LMDeployClient as Client

EOS = [101, 102, 103, 104, 2]


def error(code: int, message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The server's envelope."""
    return {"message": message, "type": kind, "code": code, "param": None, "object": "error"}


ASLEEP = error(
    503, "Engine is sleeping; call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache).", "server_error"
)
UNAUTHORIZED = error(401, "Unauthorized.", "authentication_error")
NOT_JSON = error(400, "Unsupported Media Type: Only 'application/json' is allowed")

# -- answers -------------------------------------------------------------------------------------------------


async def test_whole_answer() -> None:
    """A finished generation, every field in the server's order."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        call = client.ask(10**9, max_tokens=4)
        await engine.wait_running(1)
        engine.release(finish="length")
        status, body = await call
        assert status == 200
        assert json.dumps(body, separators=(",", ":")) == (
            '{"text":"","output_ids":[101,102,103,104],"meta_info":{"prompt_tokens":3,"completion_tokens":4,'
            '"finish_reason":{"type":"length"},"output_token_logprobs":[[-1.5,101],[-1.5,102],[-1.5,103],[-1.5,104]],'
            '"routed_experts":null}}'
        )


@pytest.mark.parametrize(("included", "ids", "text"), [(False, EOS[:-1], ""), (True, EOS, "<|eos|>")])
async def test_the_stop_token_is_dropped(included: bool, ids: list[int], text: str) -> None:
    """Id and logprob of the stop token are only there when they are asked for."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(tokens=EOS, finish="stop")
        _, body = await client.ask(10**9, include_stop_str_in_output=included)
        meta = body["meta_info"]
        assert (body["output_ids"], body["text"], meta["finish_reason"]) == (ids, text, {"type": "stop"})
        assert (len(meta["output_token_logprobs"]), meta["completion_tokens"]) == (len(ids), len(ids))


async def test_defaults() -> None:
    """128 tokens where the request does not say, no logprobs where they were not asked for, unknown keys ignored."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(finish="length")
        status, body = await client.post("/generate", {"input_ids": [1], "bogus": 1})
        assert (status, len(body["output_ids"])) == (200, 128)
        assert body["meta_info"]["output_token_logprobs"] is None


async def test_stream() -> None:
    """Chunks carry the new ids alone, the last one none and the finish reason, `[DONE]` ends it."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        call = client.follow(10**9)
        await engine.wait_running(1)
        for _ in range(3):
            engine.advance(engine.requests[0], 1)
            await client.wait_chunks(call, 1)
        engine.release(tokens=3, finish="length")
        assert [json.dumps(event, separators=(",", ":")) for event in await call.events()] == [
            *(
                f'{{"text":"","output_ids":[{101 + n}],"meta_info":{{"prompt_tokens":3,"completion_tokens":{1 + n},'
                f'"finish_reason":null,"output_token_logprobs":[[-1.5,{101 + n}]],"routed_experts":null}}}}'
                for n in range(3)
            ),
            (
                '{"text":"","output_ids":[],"meta_info":{"prompt_tokens":3,"completion_tokens":3,'
                '"finish_reason":{"type":"length"},"output_token_logprobs":null,"routed_experts":null}}'
            ),
            '"[DONE]"',
        ]


async def test_a_stream_ends_with_the_stop_token() -> None:
    """Asked for, the stop token comes in the last chunk, beside the finish reason."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(tokens=EOS, finish="stop")
        *first, last, done = await client.follow(10**9, include_stop_str_in_output=True).events()
        assert [event["output_ids"] for event in first] == [EOS[:-1]]
        assert (last["output_ids"], last["meta_info"]["output_token_logprobs"]) == ([2], [[-1.5, 2]])
        assert (last["meta_info"]["completion_tokens"], done) == (5, "[DONE]")


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "You must specify exactly one of prompt or input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "You must specify exactly one of prompt or input_ids"),
        ({"input_ids": []}, "The input_ids must not be an empty list"),
        ({"input_ids": [1], "max_tokens": 0}, "The max_tokens 0 must be a positive integer."),
        ({"input_ids": "x"}, "input_ids: Input should be a valid list"),
        ({"input_ids": [1], "max_tokens": 2, "temperature": 3}, "The temperature 3.0 must be in [0, 2]"),
        ({"input_ids": [1], "top_p": 0}, "The top_p 0.0 must be in (0, 1]."),
    ],
)
async def test_refused_values(body: dict[str, Any], message: str) -> None:
    """What the server refuses: 400 in its envelope, and nothing runs."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        assert await client.post("/generate", body) == (400, error(400, message))
        assert engine.requests == []


@pytest.mark.parametrize("path", ["/generate", "/sleep?level=1", "/wakeup"])
async def test_a_content_type_is_needed(path: str) -> None:
    """Even without a body the request has to say that it is JSON."""
    async with (
        FakeLMDeploy() as engine,
        aiohttp.ClientSession() as session,
        session.post(engine.url + path) as response,
    ):
        assert (response.status, await response.json()) == (400, NOT_JSON)


async def test_logprobs_are_off_by_default() -> None:
    """Without `--logprobs-mode` a request for them is refused, before anything else is looked at."""
    async with FakeLMDeploy(logprobs=False) as engine, Client(engine) as client:
        words = "return_logprob(True) requested but not enabled logprobs_mode in engine configuration."
        assert await client.ask(10**9) == (400, error(400, words))
        assert await client.post("/generate", {"input_ids": [], "return_logprob": True}) == (400, error(400, words))


async def test_a_duplicate_id_is_an_uncaught_error() -> None:
    """A second call with an id in flight: text, 500, a closed connection; the first is untouched."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        first = client.ask(10**9, max_tokens=30)
        await engine.wait_running(1)
        body = {"session_id": 10**9, "input_ids": [1]}
        async with client.session.post(engine.url + "/generate", json=body) as response:
            assert (response.status, await response.text()) == (500, "Internal Server Error")
            assert response.headers["Connection"] == "close"
        engine.release(finish="length")
        assert outcome(await first) == (200, {"type": "length"}, 30)


async def test_a_small_id_may_be_occupied() -> None:
    """The caller's id is compared with internal ones, which count up from 0."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        for _ in range(3):
            client.ask(-1)
        await engine.wait_running(3)
        assert await client.ask(2) == (400, error(400, "The session_id 2 is occupied."))
        client.ask(3)
        await engine.wait_running(4)


# -- aborts --------------------------------------------------------------------------------------------------


async def test_abort_of_a_running_request() -> None:
    """An abort turns a running call into a whole 200 with the partial tokens; a second finds nobody."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.tokens_so_far = 38
        victim = client.ask(1000000007)
        await engine.wait_running(1)
        assert await client.abort_one(1000000007) == (200, None)
        status, body = await victim
        assert outcome((status, body)) == (200, {"type": "abort"}, 38)
        assert len(body["meta_info"]["output_token_logprobs"]) == 38
        assert await client.abort_one(1000000007) == (400, error(400, "Session 1000000007 not found."))


async def test_abort_of_a_stream() -> None:
    """An aborted stream ends with an empty chunk that says so, and `[DONE]`."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        call = client.follow(77777)
        await engine.wait_running(1)
        engine.advance(engine.requests[0], 38)
        await client.wait_chunks(call, 1)
        assert await client.abort_one(77777) == (200, None)
        *_, last, done = await call.events()
        assert (last["output_ids"], last["meta_info"]["finish_reason"], done) == ([], {"type": "abort"}, "[DONE]")
        assert (last["meta_info"]["completion_tokens"], last["meta_info"]["output_token_logprobs"]) == (38, None)


async def test_abort_of_a_waiting_request_is_lost() -> None:
    """Answered 200, and the call runs to its end later; no abort by id finds it any more."""
    async with FakeLMDeploy(slots=2) as engine, Client(engine) as client:
        calls = [client.ask(1000000100 + n) for n in range(2)]
        await engine.wait_running(2)
        waiting = client.ask(1000000102)
        await engine.wait_requests(3)
        assert await client.abort_one(1000000102) == (200, None)
        assert await client.abort_one(1000000102) == (400, error(400, "Session 1000000102 not found."))
        for _ in range(2):
            engine.release(finish="length")
        for call in [*calls, waiting]:
            assert outcome(await call) == (200, {"type": "length"}, 100)


async def test_abort_all_and_a_later_arrival() -> None:
    """`abort_all` ends running and waiting ones, the waiting without a token; what arrives later runs."""
    async with FakeLMDeploy(slots=2) as engine, Client(engine) as client:
        engine.tokens_so_far = 28
        calls = []
        for n in range(4):
            calls.append(client.ask(10**9 + n))
            await engine.wait_requests(n + 1)
        assert await client.abort_all() == (200, None)
        assert [outcome(await call) for call in calls] == [(200, {"type": "abort"}, n) for n in (28, 28, 0, 0)]
        later = client.ask(10**9 + 9, max_tokens=10)
        await engine.wait_running(1)
        engine.release(finish="length")
        assert outcome(await later) == (200, {"type": "length"}, 10)


async def test_waiting_ones_end_when_a_handle_is_free() -> None:
    """The epoch is looked at by whoever gets a handle: while none is free, those who wait go on waiting."""
    async with FakeLMDeploy(slots=1) as engine, Client(engine) as client:
        engine.hold_aborts = True
        running = client.ask(10**9)
        await engine.wait_running(1)
        waiting = client.ask(10**9 + 1)
        await engine.wait_requests(2)
        await client.abort_all()
        assert (engine.running, engine.waiting) == (1, 1)
        assert engine.settle_aborts() == 1
        assert [outcome(await call)[2] for call in (running, waiting)] == [3, 0]


async def test_abort_handling_is_off_by_default() -> None:
    """Without `--enable-abort-handling`: 501 in plain text."""
    async with FakeLMDeploy(abort_handling=False) as engine, Client(engine) as client:
        words = "This server does not support abort requests. Enable with --enable-abort-handling flag."
        assert await client.abort_all() == (501, words)


async def test_max_concurrent_requests_holds_every_route_up() -> None:
    """With N whole generations in work, an abort and a look at the health wait for them."""
    async with FakeLMDeploy(max_concurrent=2) as engine, Client(engine) as client:
        calls = [client.ask(10**9 + n, max_tokens=200) for n in range(2)]
        await engine.wait_running(2)
        abort, health = client.abort_all(), client.get("/health")
        await engine.wait_hits("/health", 1)
        assert not engine.aborts
        assert not abort.done()
        engine.release(finish="length")
        assert [outcome(await call) for call in calls] == [(200, {"type": "length"}, 200)] * 2
        assert await abort == (200, None)
        assert await health == (200, {"status": "healthy", "message": "Engine is healthy."})


async def test_streams_give_their_place_back() -> None:
    """A stream holds its place until its head is sent: an abort stays prompt."""
    async with FakeLMDeploy(max_concurrent=2) as engine, Client(engine) as client:
        calls = [client.follow(10**9 + n) for n in range(2)]
        await engine.wait_running(2)
        assert await client.abort_all() == (200, None)
        for call in calls:
            assert (await call.events())[-2]["meta_info"]["finish_reason"] == {"type": "abort"}


@pytest.mark.parametrize("handler_cancellation", [False, True])
async def test_disconnect(handler_cancellation: bool) -> None:
    """A client that leaves frees its session."""
    async with FakeLMDeploy(handler_cancellation=handler_cancellation) as engine, Client(engine) as client:
        call = client.ask(424242)
        await engine.wait_running(1)
        call.cancel()
        while not handler_cancellation and not engine.notice_disconnects():
            await client.get("/health")
        await engine.wait_idle()
        assert await client.abort_one(424242) == (400, error(400, "Session 424242 not found."))


# -- sleep, keys, weights, looks -----------------------------------------------------------------------------


async def test_sleep_and_wakeup() -> None:
    """Sleep aborts; while anything sleeps generations are refused; `/health` lags behind."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        engine.tokens_so_far = 20
        call = client.ask(10**9)
        await engine.wait_running(1)
        assert await client.post("/sleep?level=1", None) == (200, None)
        assert outcome(await call) == (200, {"type": "abort"}, 20)
        assert await client.ask(10**9 + 1) == (503, ASLEEP)
        assert await client.get("/health") == (200, {"status": "healthy", "message": "Engine is healthy."})
        assert await client.get("/is_sleeping") == (200, {"is_sleeping": True})
        engine.poll_health()
        assert (await client.get("/health"))[1]["status"] == "sleeping"
        level = error(400, 'The "level" query parameter must be 1 or 2.')
        assert await client.post("/sleep?level=3", None) == (400, level)
        assert await client.post("/wakeup?tags=weights", None) == (200, None)
        assert await client.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert await client.ask(10**9 + 2) == (503, ASLEEP)
        for tag in ("kv_cache", "bogus"):
            assert await client.post(f"/wakeup?tags={tag}", None) == (200, None)
        engine.answer = lambda _: Reply(finish="length")
        assert outcome(await client.ask(10**9 + 3, max_tokens=2)) == (200, {"type": "length"}, 2)


async def test_keys() -> None:
    """Every route takes the key but a few."""
    async with FakeLMDeploy(api_key="k", abort_handling=False) as engine:
        async with Client(engine) as client:
            assert (await client.get("/health"))[0] == 200
            for path in ("/v1/models", "/is_sleeping", "/metrics", "/nowhere"):
                assert await client.get(path) == (401, UNAUTHORIZED)
            for path in ("/generate", "/abort_request", "/update_weights", "/sleep"):
                assert await client.post(path, {}) == (401, UNAUTHORIZED)
        async with Client(engine, "k") as client:
            assert (await client.abort_all())[0] == 501
            missing = error(400, "serialized_named_tensors: Field required")
            assert await client.post("/update_weights", {}) == (400, missing)
            assert await client.post("/sleep", {}) == (200, None)


async def test_update_weights() -> None:
    """200 with `null`; a failure is an uncaught error; there is no weight version."""
    async with FakeLMDeploy() as engine, Client(engine) as client:
        nothing = base64.b64encode(pickle.dumps({"metadata": []})).decode()
        body = {"serialized_named_tensors": nothing, "load_format": "flattened_bucket", "finished": True}
        assert await client.post("/update_weights", body) == (200, None)
        body["serialized_named_tensors"] = "aGk="
        assert await client.post("/update_weights", body) == (500, "Internal Server Error")
        body = {"serialized_named_tensors": ["aGk="], "load_format": "boom"}
        assert await client.post("/update_weights", body) == (500, "Internal Server Error")
        assert await client.get("/model_info") == (404, {"detail": "Not Found"})


async def test_looks() -> None:
    """What a client may look at: the model, the paths, the backend, when the process started."""
    async with FakeLMDeploy(model="m") as engine, Client(engine) as client:
        _, models = await client.get("/v1/models")
        [card] = models["data"]
        assert (models["object"], card["id"], card["owned_by"], card["root"]) == ("list", "m", "lmdeploy", "m")
        assert "/generate" in (await client.get("/openapi.json"))[1]["paths"]
        assert (await client.get("/distserve/engine_info"))[0] == 200
        before = (await client.get("/metrics"))[1]
        assert "\nprocess_start_time_seconds 1.795220330e+09\n" in before
        call = client.ask(10**9)
        await engine.wait_running(1)
        assert (await client.get("/metrics"))[1] == before  # gauges are up to 10 s old
        engine.poll_gauges()
        assert 'num_requests_running{engine="0",model_name="m"} 1.0' in (await client.get("/metrics"))[1]
        call.cancel()
        await engine.restart()
        assert "\nprocess_start_time_seconds 1.795220430e+09\n" in (await client.get("/metrics"))[1]


async def test_what_can_be_switched_off() -> None:
    """No docs, no metrics: 404; TurboMind fails where it is asked for the other backend's info."""
    async with FakeLMDeploy(docs=False, metrics=False, pytorch=False) as engine, Client(engine) as client:
        assert await client.get("/openapi.json") == (404, {"detail": "Not Found"})
        assert await client.get("/metrics") == (404, {"detail": "Not Found"})
        assert (await client.get("/distserve/engine_info"))[0] == 500
