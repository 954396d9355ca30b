"""The fake engine gives the recorded statuses, shapes and order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client import Client, outcome
from tests.support.fake_sglang import FakeSGLang, Reply

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


async def test_whole_answer() -> None:
    """A finished generation, every field in the engine's order."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("r0", max_new_tokens=4)
        await engine.wait_running(1)
        engine.release("r0", tokens=4, finish="length")
        status, body = await call
        assert status == 200
        assert list(body) == ["text", "output_ids", "meta_info"]
        assert body["text"] == "xxxx"
        assert body["output_ids"] == [101, 102, 103, 104]
        assert list(body["meta_info"].items()) == [
            ("id", "r0"),
            ("finish_reason", {"type": "length", "length": 4}),
            ("prompt_tokens", 3),
            ("weight_version", "default"),
            ("num_retractions", 0),
            ("input_token_logprobs", []),
            ("output_token_logprobs", [[-1.5, 101, None], [-1.5, 102, None], [-1.5, 103, None], [-1.5, 104, None]]),
            ("output_token_logprobs_length", 4),
            ("reasoning_tokens", 0),
            ("completion_tokens", 4),
            ("cached_tokens", 0),
            ("e2e_latency", 0.035),
            ("response_sent_to_client_ts", 1795220741.89),
        ]


async def test_stop_names_the_token() -> None:
    """A stop reason carries the token that matched, which is among the ids."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(tokens=[7, 8, 2], logprobs=[-0.1, -0.2, -0.3])
        _, body = await client.generate("r0")
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert body["meta_info"]["output_token_logprobs"] == [[-0.1, 7, None], [-0.2, 8, None], [-0.3, 2, None]]


async def test_defaults() -> None:
    """Without an id the engine makes one, without logprobs asked none are sent, and the default budget is 128."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.answer = lambda _: Reply(finish="length")
        status, body = await client.post("/generate", {"input_ids": [1], "bogus": 1})
        assert status == 200
        assert len(body["meta_info"]["id"]) == 32
        assert "output_token_logprobs" not in body["meta_info"]
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


async def test_stream_is_cumulative() -> None:
    """Chunks repeat all ids so far, the last has the finish reason, `[DONE]` ends it."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.stream("st0")
        await engine.wait_running(1)
        for _ in range(2):
            engine.advance(engine.live["st0"], 1)
            await client.wait_chunks(call, 1)
        engine.release("st0", tokens=3, finish="length")
        events = await call.events()
        assert events[-1] == "[DONE]"
        assert [event["output_ids"] for event in events[:-1]] == [[101], [101, 102], [101, 102, 103]]
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [
            None,
            None,
            {"type": "length", "length": 3},
        ]
        assert events[0]["meta_info"] == {
            "id": "st0",
            "finish_reason": None,
            "prompt_tokens": 3,
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-1.5, 101, None]],
            "output_token_logprobs_length": 1,
            "reasoning_tokens": 0,
            "completion_tokens": 1,
            "cached_tokens": 0,
            "response_sent_to_client_ts": 1795220741.89,
        }


async def test_aborted_stream() -> None:
    """An aborted stream ends with the abort chunk and `[DONE]`."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.stream("sa")
        await engine.wait_running(1)
        engine.advance(engine.live["sa"], 35)
        await client.wait_chunks(call, 1)
        await client.abort("sa")
        events = await call.events()
        assert events[-2]["meta_info"]["finish_reason"] == ABORTED
        assert len(events[-2]["output_ids"]) == 35
        assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}),
        (
            {"input_ids": [1] * 5000, "sampling_params": {}},
            {
                "error": {
                    "message": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
                },
            },
        ),
        (
            {"input_ids": [1], "sampling_params": {"temperature": -1}},
            {"error": {"message": "temperature must be a non-negative finite number, got -1."}},
        ),
    ],
)
async def test_refused_values(body: dict[str, Any], error: dict[str, Any]) -> None:
    """Values the engine refuses: 400 with a message, and nothing runs."""
    async with FakeSGLang() as engine, Client(engine) as client:
        assert await client.post("/generate", body) == (400, error)
        assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "start"),
    [
        ("/generate", {"input_ids": [1], "rid": 5}, "2 validation errors:\n  {'type': 'string_type', 'loc': ('body'"),
        (
            "/generate",
            {"input_ids": "x"},
            "1 validation error:\n  {'type': 'value_error', 'loc': ('body', 'input_ids')",
        ),
        (
            "/abort_request",
            None,
            "1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required'",
        ),
        ("/abort_request", {"abort_all": "x"}, "1 validation error:\n  {'type': 'bool_parsing'"),
        ("/pause_generation", None, "1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field req"),
        ("/pause_generation", {"mode": "x"}, "1 validation error:\n  {'type': 'literal_error'"),
    ],
)
async def test_bodies_of_the_wrong_shape(path: str, body: Any, start: str) -> None:
    """A body of the wrong shape: 400 in the schema's own envelope."""
    async with FakeSGLang() as engine, Client(engine) as client:
        status, answer = await client.post(path, body)
        assert status == 400
        assert answer.pop("message").startswith(start)
        assert answer == {"object": "error", "type": "Bad Request", "param": None, "code": 400}


async def test_unknown_sampling_key() -> None:
    """An unknown sampling key is refused by name, with the list of known ones."""
    async with FakeSGLang() as engine, Client(engine) as client:
        status, body = await client.post("/generate", {"input_ids": [1], "sampling_params": {"bogus": 1}})
        assert status == 400
        assert body["error"].startswith("unknown field `bogus`, expected one of `max_new_tokens`, `stop`, `stop_token")


async def test_duplicate_rid() -> None:
    """A second call with an id in flight is refused; the first is untouched."""
    async with FakeSGLang() as engine, Client(engine) as client:
        first = client.generate("dup", max_new_tokens=30)
        await engine.wait_running(1)
        assert await client.generate("dup") == (400, {"error": {"message": "Duplicate request ID detected: dup"}})
        engine.release("dup", finish="length")
        assert outcome(await first) == (200, {"type": "length", "length": 30}, 30)


async def test_abort_of_a_running_request() -> None:
    """An abort turns a running call into a whole 200 with the partial tokens."""
    async with FakeSGLang() as engine, Client(engine) as client:
        engine.tokens_so_far = 35
        victim = client.generate("vic")
        await engine.wait_running(1)
        assert await client.abort("vic") == (200, None)
        status, body = await victim
        assert outcome((status, body)) == (200, ABORTED, 35)
        assert list(body["meta_info"])[:5] == [
            "id",
            "finish_reason",
            "prompt_tokens",
            "weight_version",
            "num_retractions",
        ]
        assert engine.aborts == [{"rid": "vic"}]


async def test_abort_of_a_queued_request() -> None:
    """A queued call is aborted with no token and with fewer fields."""
    async with FakeSGLang(slots=2) as engine, Client(engine) as client:
        calls = [client.generate(f"que{index}", max_new_tokens=100) for index in range(2)]
        await engine.wait_running(2)
        queued = client.generate("que2")
        await engine.wait_requests(3)
        assert (engine.running, engine.waiting) == (2, 1)
        assert await client.abort("que2") == (200, None)
        status, body = await queued
        assert outcome((status, body)) == (200, ABORTED_IN_QUEUE, 0)
        assert body["meta_info"] == {
            "id": "que2",
            "finish_reason": ABORTED_IN_QUEUE,
            "weight_version": "default",
            "output_token_logprobs": [],
            "output_token_logprobs_length": 0,
            "completion_tokens": 0,
        }
        engine.release(finish="length")
        assert [outcome(await call)[2] for call in calls] == [100, 100]


async def test_abort_is_by_prefix() -> None:
    """An exact id also aborts the ids it begins; a mere prefix of no exact id aborts none."""
    async with FakeSGLang() as engine, Client(engine) as client:
        calls = {rid: client.generate(rid, max_new_tokens=60) for rid in ("job-1", "job-10", "job-2")}
        await engine.wait_running(3)
        await client.abort("job")
        assert engine.running == 3
        await client.abort("job-1")
        assert outcome(await calls["job-1"])[1] == ABORTED
        assert outcome(await calls["job-10"])[1] == ABORTED
        assert engine.running == 1
        engine.release("job-2", finish="length")
        assert outcome(await calls["job-2"])[2] == 60


@pytest.mark.parametrize("body", [{"rid": "nope"}, {}, {"rid": ""}])
async def test_abort_of_nobody(body: dict[str, Any]) -> None:
    """An abort of an unknown or empty id is a 200 with no effect."""
    async with FakeSGLang() as engine, Client(engine) as client:
        call = client.generate("r0")
        await engine.wait_running(1)
        assert await client.post("/abort_request", body) == (200, None)
        assert engine.running == 1
        engine.release()
        assert outcome(await call)[0] == 200


async def test_abort_all_and_a_later_arrival() -> None:
    """`abort_all` ends queued and running ones, and never outlives its moment."""
    async with FakeSGLang(slots=2) as engine, Client(engine) as client:
        engine.tokens_so_far = 17
        calls = [client.generate(f"a{index}") for index in range(3)]
        await engine.wait_requests(3)
        assert await client.post("/abort_request", {"abort_all": True}) == (200, None)
        answers = sorted([outcome(await call) for call in calls], key=lambda answer: answer[2])
        assert answers == [(200, ABORTED_IN_QUEUE, 0), (200, ABORTED, 17), (200, ABORTED, 17)]
        later = client.generate("later", max_new_tokens=5)
        await engine.wait_running(1)
        engine.release(finish="length")
        assert outcome(await later) == (200, {"type": "length", "length": 5}, 5)
