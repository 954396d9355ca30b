"""The fake vLLM gives the statuses, shapes and order that were recorded from vLLM 0.32."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support import vllm_wire as wire
from tests.support.fake_vllm import FakeVLLM, Reply, Status
from tests.support.vllm_client import VLLMClient, outcome

SPAN = {"version": "default", "start": 0}


async def test_a_whole_answer_is_the_recorded_one() -> None:
    """Every field of a finished generation, in the engine's order, byte for byte but for ranks."""
    recorded = (
        '{"request_id":"generate-tokens-job-1","model":"tiny","created":1795221010,"usage":{"prompt_tokens":4,'
        '"total_tokens":7,"completion_tokens":3,"prompt_tokens_details":null,"completion_tokens_details":null},'
        '"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":[10,20,30,40],'
        '"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,'
        '"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,'
        '"token_ids":[374,129,350],"routed_experts":null,"sampling_mask":null,'
        '"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":{"content":['
        '{"token_id":374,"logprob":-6.464874267578125,"rank":1,"top_logprobs":[{"token_id":374,'
        '"logprob":-6.464874267578125,"rank":1}]},{"token_id":129,"logprob":-6.091219902038574,"rank":1,'
        '"top_logprobs":[{"token_id":129,"logprob":-6.091219902038574,"rank":1}]},{"token_id":350,'
        '"logprob":-6.155245304107666,"rank":1,"top_logprobs":[{"token_id":350,"logprob":-6.155245304107666,'
        '"rank":1}]}]}}]}'
    )
    async with FakeVLLM(model="tiny") as engine, VLLMClient(engine) as client:
        logprobs = [-6.464874267578125, -6.091219902038574, -6.155245304107666]
        engine.answer = lambda _: Reply(tokens=[374, 129, 350], logprobs=logprobs, finish="length")
        status, body = await client.ask("job-1", max_tokens=3, return_token_ids=True)
        assert status == 200
        assert json.dumps(body, separators=(",", ":")) == recorded


async def test_a_stream_is_the_recorded_one() -> None:
    """Deltas; weight versions on the last chunk alone; usage in one without choices; `[DONE]`."""

    def chunk(token: int, finish: str | None, versions: Any) -> dict[str, Any]:
        entry = {"token_id": token, "logprob": -1.5, "rank": 1}
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [token],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": versions,
            "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]},
        }
        return {"request_id": "generate-tokens-st", "usage": None, "output_mode": "tokens", "choices": [choice]}

    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        stream = client.ask_stream("st", stream_options={"include_usage": True})
        await engine.wait_running(1)
        engine.advance(engine.call("st"), 1)
        await stream.wait_chunks(1)
        engine.release("st", tokens=2, finish="length")
        assert await stream.events() == [
            chunk(101, None, None),
            chunk(102, "length", [{**SPAN, "end": 2}]),
            {
                "request_id": "generate-tokens-st",
                "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
                "output_mode": "tokens",
                "choices": [],
            },
            "[DONE]",
        ]


async def test_an_aborted_stream_ends_with_an_empty_chunk() -> None:
    """One more chunk, without tokens but with the versions of all, then `[DONE]`."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        stream = client.ask_stream("rB")
        await engine.wait_running(1)
        engine.advance(engine.call("rB"), 927)
        await stream.wait_chunks(1)
        assert await client.abort_ids("generate-tokens-rB") == (200, {"status": "aborted", "aborted": 1})
        *_, last, done = await stream.events()
        (choice,) = last["choices"]
        assert (choice["finish_reason"], choice["token_ids"], done) == ("abort", [], "[DONE]")
        assert choice["weight_versions"] == [{**SPAN, "end": 927}]
        assert choice["logprobs"] == {"content": []}


async def test_n_is_several_choices() -> None:
    """Without logprobs asked none are sent; `n` gives as many choices, and one abort ends them all."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        call = client.post(
            "/inference/v1/generate", {"request_id": "n2", "token_ids": [1], "sampling_params": {"n": 2}}
        )
        await engine.wait_running(1)
        assert engine.call("n2").max_tokens == 4095  # the rest of the context, where the key is absent
        await client.abort_ids("generate-tokens-n2")
        _, body = await call
        assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [
            (0, "abort"),
            (1, "abort"),
        ]
        assert body["choices"][0]["logprobs"] is None


async def test_unknown_keys_are_ignored() -> None:
    """A sampling key it does not know is no error: it is as if it were not there."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.answer = lambda _: Reply()
        sampling = {"max_new_tokens": 1, "max_tokens": 9, "logprobs": 0}
        status, body = await client.ask("a", sampling_params=sampling, bogus=1)
        assert (status, len(body["choices"][0]["token_ids"])) == (200, 4)


# -- ids and aborts --------------------------------------------------------------------------------------------


async def test_an_abort_needs_the_engines_own_id() -> None:
    """A bare id is answered as if it had aborted one, and aborts nothing; with the prefix it does."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        call = client.ask("rA")
        await engine.wait_running(1)
        assert await client.abort_ids("rA") == (200, {"status": "aborted", "aborted": 1})
        assert engine.running == 1
        engine.advance(engine.call("rA"), 512)
        assert await client.abort_ids("generate-tokens-rA") == (200, {"status": "aborted", "aborted": 1})
        assert outcome(await call) == (200, "abort", 512, [{**SPAN, "end": 512}])


async def test_abort_of_a_queued_request_and_of_all() -> None:
    """A queued one ends at once without a token; `{}`, null and an empty list all mean everything."""
    async with FakeVLLM(slots=2) as engine, VLLMClient(engine) as client:
        calls = [client.ask(f"q{n}") for n in range(4)]
        await engine.wait_requests(4)
        assert await client.gauges() == (2, 2)
        assert await client.abort_ids("generate-tokens-q3") == (200, {"status": "aborted", "aborted": 1})
        assert outcome(await calls[3]) == (200, "abort", 0, [])
        assert await client.post("/abort_requests", {}) == (200, {"status": "aborted", "aborted": 3})
        assert [outcome(await call)[1:3] for call in calls[:3]] == [("abort", 3), ("abort", 3), ("abort", 0)]
        assert await client.gauges() == (0, 0)
        bodies: list[dict[str, Any]] = [{"request_ids": []}, {"request_ids": None}]
        for body in bodies:
            call = client.ask("again")
            await engine.wait_running(1)
            assert await client.post("/abort_requests", body) == (200, {"status": "aborted", "aborted": 1})
            assert outcome(await call)[1] == "abort"


async def test_the_route_beside_generation_wants_ids() -> None:
    """Behind the key, ids required, and an empty answer."""
    async with FakeVLLM(api_key="k1") as engine, VLLMClient(engine, "k1") as client:
        call = client.ask("rE")
        await engine.wait_running(1)
        answer = await client.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-rE"]})
        assert answer == (200, None)
        assert outcome(await call)[1] == "abort"
        missing = {
            "error": {
                "message": "Missing 'request_ids' in request body",
                "type": "Bad Request",
                "param": None,
                "code": 400,
            }
        }
        assert await client.post("/inference/v1/abort_requests", {}) == (400, missing)


async def test_an_abort_does_not_outlive_its_moment() -> None:
    """The id of an abort that came too early runs to its end."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        assert await client.abort_ids("generate-tokens-late") == (200, {"status": "aborted", "aborted": 1})
        engine.answer = lambda _: Reply(finish="length")
        assert outcome(await client.ask("late", max_tokens=20))[:3] == (200, "length", 20)


async def test_bad_aborts() -> None:
    """No JSON and a list are refused; a string counts its letters and aborts nothing."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        running = client.ask("x")
        await engine.wait_running(1)
        assert (await client.post("/abort_requests", None))[0] == 400
        assert (await client.post("/abort_requests", []))[1]["error"]["message"] == "Request body must be a JSON object"
        answer = await client.post("/abort_requests", {"request_ids": "generate-tokens-x"})
        assert answer == (200, {"status": "aborted", "aborted": 17})
        assert not running.done()


async def test_two_requests_of_one_id() -> None:
    """They run side by side, and one abort ends both."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        calls = [client.ask("dup"), client.ask("dup")]
        await engine.wait_running(2)
        await client.abort_ids("generate-tokens-dup")
        assert [outcome(await call)[1] for call in calls] == ["abort", "abort"]


async def test_the_header_wins() -> None:
    """`X-Request-Id` is the id, whatever the body says."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.answer = lambda _: Reply()
        async with client.session.post(
            client.url + "/inference/v1/generate", json=client.request("body"), headers={"X-Request-Id": "hdrid"}
        ) as response:
            assert (await response.json())["request_id"] == "generate-tokens-hdrid"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed(stream: bool) -> None:
    """A connection that closes ends its generation, whole or streamed; also while frozen."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        call = client.ask_stream("gone").task if stream else client.ask("gone")
        await engine.wait_running(1)
        await client.freeze()
        call.cancel()
        await engine.wait_idle()
        assert await client.gauges() == (0, 0)


async def test_a_client_that_leaves_is_noticed_later() -> None:
    """The other way a server may be: it runs on until somebody looks."""
    async with FakeVLLM(handler_cancellation=False) as engine, VLLMClient(engine) as client:
        call = client.ask("gone")
        await engine.wait_running(1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await client.get("/health")  # by the time this is answered, the server has read the end of the other
        assert (engine.running, engine.notice_disconnects(), engine.running) == (1, 1, 0)


# -- switches, keys, refusals ----------------------------------------------------------------------------------


async def test_without_scale_out() -> None:
    """The routes are there and answer 403, with the flag in their words; documentation does not list them."""
    async with FakeVLLM(scale_out=False) as engine, VLLMClient(engine) as client:
        status, body = await client.ask("a")
        assert (status, body) == (403, wire.SCALE_OUT_OFF)
        assert body["error"]["type"] == "PermissionDeniedError"
        _, openapi = await client.get("/openapi.json")
        assert "/inference/v1/generate" not in openapi["paths"]
        assert "/pause" in openapi["paths"]


async def test_without_development_mode() -> None:
    """What controls is not there: 404."""
    async with FakeVLLM(dev_mode=False) as engine, VLLMClient(engine) as client:
        for path in ("/pause", "/resume", "/abort_requests", "/collective_rpc", "/update_weight_version"):
            assert await client.post(path, {}) == (404, {"detail": "Not Found"})
        assert await client.get("/weight_info") == (404, {"detail": "Not Found"})


async def test_the_key_guards_data_alone() -> None:
    """`/v1` and `/inference` want it; control is open to anybody."""
    async with FakeVLLM(api_key="k1") as engine, VLLMClient(engine) as client:
        assert await client.get("/v1/models") == (401, {"error": "Unauthorized"})
        assert await client.ask("a") == (401, {"error": "Unauthorized"})
        assert (await client.post("/inference/v1/abort_requests", {"request_ids": ["x"]}))[0] == 401
        assert await client.freeze() == (200, {"status": "paused"})
        assert (await client.get("/version"), await client.get("/health")) == (
            (200, {"version": "0.32.0"}),
            (200, None),
        )
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"token_ids": []}, 400, "1 validation error:\n  {'type': 'too_short', 'loc': 'body.token_ids'"),
        ({"token_ids": [999]}, 400, "Token id 999 is out of vocabulary"),
        ({"model": "x"}, 404, "The model `x` does not exist. Valid aliases: tiny-model."),
        ({"sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"sampling_params": {"top_p": 0}}, 400, "top_p"),
        ({"sampling_params": {"n": 9}}, 400, "sampling_params.n must be at most the server's max_num_seqs (2), got 9."),
        ({"sampling_params": []}, 400, "1 validation error"),
        ({"token_ids": "x"}, 400, "1 validation error"),
        ({"token_ids": [1] * 4096}, 400, "context length"),
    ],
)
async def test_what_is_refused(change: dict[str, Any], status: int, message: str) -> None:
    """Bad values, ids out of the vocabulary and unknown models; the envelope has its code."""
    async with FakeVLLM(slots=2, vocabulary=512) as engine, VLLMClient(engine) as client:
        got, body = await client.ask("a", **change)
        assert got == body["error"]["code"] == status
        assert message in body["error"]["message"]
        assert not engine.requests


async def test_what_it_tells_of_itself() -> None:
    """The looks a probe takes."""
    async with FakeVLLM(slots=8, context=2048, model="tiny") as engine, VLLMClient(engine) as client:
        _, models = await client.get("/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 2048)
        _, info = await client.get("/server_info?config_format=json")
        assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"
        assert info["vllm_config"]["scheduler_config"]["max_num_seqs"] == 8
        _, openapi = await client.get("/openapi.json")
        assert {"/inference/v1/generate", "/pause", "/collective_rpc", "/v1/models"} <= set(openapi["paths"])


# -- death ---------------------------------------------------------------------------------------------------


async def test_death_of_the_core() -> None:
    """In flight: 500, or an error in the stream; then engine routes are 500 and nobody listens any more."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        whole, stream = client.ask("nonstream"), client.ask_stream("st")
        await engine.wait_running(2)
        engine.die()
        assert await whole == (500, wire.CORE_DEAD)
        assert await stream.events() == [wire.CORE_DEAD, "[DONE]"]
        assert (await client.get("/weight_info"))[0] == 500
        assert (await client.get("/health"))[0] == 503
        await engine.kill()
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get("/health")


async def test_sigterm_aborts() -> None:
    """In flight: 200 and an abort, with what there is; then the port closes."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        whole, stream = client.ask("nonstream"), client.ask_stream("st")
        await engine.wait_running(2)
        engine.advance(engine.call("nonstream"), 138)
        await engine.terminate()
        assert outcome(await whole)[:3] == (200, "abort", 138)
        *_, last, done = await stream.events()
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get("/health")


async def test_a_500_closes_its_connection() -> None:
    """The next call finds a new one."""
    async with FakeVLLM() as engine, VLLMClient(engine) as client:
        engine.script("/weight_info", Status(500, wire.CORE_DEAD))
        async with client.session.get(client.url + "/weight_info") as response:
            assert (response.status, response.headers["Connection"]) == (500, "close")
        assert (await client.get("/weight_info"))[0] == 200
