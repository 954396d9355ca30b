"""Requests over real sockets: statuses, bodies, aborts."""

from typing import Any

import pytest

from tests.embedded.helpers import (
    ABORTED,
    ABORTED_QUEUED,
    VOCABULARY,
    job,
    plain_logprobs,
    served,
    small_model,
    uninterrupted_ids,
)


async def test_generate_answers_tokens_logprobs_and_meta() -> None:
    """The answer holds the ids, their text, and log-probabilities equal to the plain forward pass."""
    async with served(is_open=True) as engine:
        status, body = await engine.generate("r1", limit=20)
        assert status == 200
        meta = body["meta_info"]
        assert meta["id"] == "r1"
        assert meta["finish_reason"] == {"type": "length", "length": 20}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 20, 0)
        assert meta["weight_version"] == "default"
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]
        logprobs, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
        assert list(ids) == body["output_ids"]
        assert set(texts) == {None}
        assert body["text"] == VOCABULARY.decode(body["output_ids"])
        done = job("r1")
        done.ids = body["output_ids"]
        assert list(logprobs) == pytest.approx(plain_logprobs(small_model(), done), abs=1e-4)
        engine.assert_idle()


async def test_text_goes_in_as_well_as_ids() -> None:
    """`text` is encoded by the vocabulary; PUT is POST; log-probabilities come only when asked for."""
    async with served(is_open=True) as engine:
        sampling = {"sampling_seed": 1, "max_new_tokens": 5}
        _, by_text = await engine.call("/generate", {"text": "héllo", "sampling_params": sampling})
        ids = list("héllo".encode())
        _, by_ids = await engine.call("/generate", {"input_ids": ids, "sampling_params": sampling}, method="PUT")
        assert by_text["output_ids"] == by_ids["output_ids"]
        assert by_text["meta_info"]["prompt_tokens"] == 6
        assert "output_token_logprobs" not in by_text["meta_info"]
        assert by_text["meta_info"]["id"] != by_ids["meta_info"]["id"]


async def test_the_answer_is_cut_before_the_stop_string() -> None:
    """Text ends before the stop string, ids after the token that completed it."""
    async with served(is_open=True) as engine:
        _, free = await engine.generate("free", limit=100)
        letter = next(piece for piece in free["text"][5:] if piece.isascii() and piece.isprintable())
        _, cut = await engine.generate("cut", limit=100, stop=letter)
        _, kept = await engine.generate("kept", limit=100, stop=[letter], no_stop_trim=True)
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}
        assert cut["text"] + letter == kept["text"]
        assert cut["output_ids"] == kept["output_ids"] == free["output_ids"][: len(cut["output_ids"])]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [1] * 300}, "The input (300 tokens) is longer than the model's context length (256 tokens)."),
        ({"input_ids": [1] * 256}, "The input (256 tokens) fills the model's context length (256 tokens)."),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [1, 257]}, "token id 257 is outside the vocabulary of 257"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": [1], "text": "a"}, "Only one of text and input_ids"),
        ({"input_ids": [[1], [2]]}, "Batches are not supported"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "non-negative finite number, got -1."),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "n is not supported by this engine: only 1, got 2."),
    ],
)
async def test_values_that_cannot_be_honoured_are_refused(body: dict[str, Any], words: str) -> None:
    """400 with the reason, in the shape of the engine's own checks; nothing runs."""
    async with served() as engine:
        status, answer = await engine.call("/generate", body)
        assert status == 400
        assert words in answer["error"]["message"]
        engine.assert_idle()


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/generate", None, "body"),
        ("/generate", [1], "body"),
        ("/generate", {"input_ids": [1], "rid": 5}, "body.rid"),
        ("/generate", {"input_ids": "x"}, "must be list or null; got str"),
        ("/generate", {"input_ids": [1, "2"]}, "body.input_ids"),
        ("/generate", {"input_ids": [1, None]}, "body.input_ids"),
        ("/generate", {"input_ids": [True]}, "body.input_ids"),
        ("/generate", {"text": 5}, "body.text"),
        ("/generate", {"input_ids": [1], "sampling_params": 5}, "body.sampling_params"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
            "body.sampling_params.temperature",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop": 5}}, "body.sampling_params.stop"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"stop_token_ids": 5}},
            "body.sampling_params.stop_token_ids",
        ),
        ("/generate", {"input_ids": [1], "return_logprob": "yes"}, "body.return_logprob"),
        ("/abort_request", None, "body"),
        ("/abort_request", {"abort_all": "x"}, "body.abort_all"),
        ("/abort_request", {"rid": 5}, "body.rid"),
        ("/pause_generation", None, "body"),
        ("/pause_generation", {"mode": "x"}, "'abort', 'retract', 'in_place'; got 'x'"),
        ("/update_weight_version", {}, "body.new_version"),
        ("/update_weights_from_disk", {}, "body.model_path"),
    ],
)
async def test_bodies_of_the_wrong_shape_are_refused(path: str, body: Any, where: str) -> None:
    """400 with the path of the field, in the shape of the schema's checks."""
    async with served() as engine:
        status, answer = await engine.call(path, body)
        assert status == 400
        assert answer["object"] == "error"
        assert answer["code"] == 400
        assert where in answer["message"]


async def test_bodies_that_are_not_json_are_refused() -> None:
    """400, not 500."""
    async with served() as engine:
        status, answer = await engine.call("/generate", data=b"{nope")
        assert (status, answer["object"]) == (400, "error")


async def test_an_unknown_sampling_key_is_named() -> None:
    """Unknown sampling keys are refused by name with those that are known; unknown top-level keys are ignored."""
    async with served(is_open=True) as engine:
        status, answer = await engine.call("/generate", {"input_ids": [1], "sampling_params": {"bogus": 1}})
        assert status == 400
        assert answer["error"].startswith("unknown field `bogus`, expected one of `max_new_tokens`, `stop`")
        body = {"input_ids": [1], "bogus": 1, "sampling_params": {"max_new_tokens": 2, "min_p": 0.0, "top_p": None}}
        assert (await engine.call("/generate", body))[0] == 200


async def test_a_request_id_is_in_flight_once() -> None:
    """A second request with the id of one in flight is refused; later the id is free."""
    async with served() as engine:
        first = engine.generate("same")
        await engine.queued(1)
        status, answer = await engine.generate("same")
        assert (status, answer) == (400, {"error": {"message": "Duplicate request ID detected: same"}})
        engine.scheduler.open()
        assert (await first)[0] == 200
        assert (await engine.generate("same"))[0] == 200


async def test_an_abort_answers_with_the_partial_output() -> None:
    """200, the abort reason, and a prefix of what the uninterrupted request gives."""
    whole = uninterrupted_ids(60)
    async with served() as engine:
        cut = engine.generate("cut", limit=60)
        await engine.queued(1)
        await engine.step(9)
        assert await engine.call("/abort_request", {"rid": "cut"}) == (200, "")
        status, body = await cut
        assert status == 200
        assert body["meta_info"]["finish_reason"] == ABORTED
        assert body["output_ids"] == whole[:10]
        assert body["meta_info"]["output_token_logprobs_length"] == body["meta_info"]["completion_tokens"] == 10
        engine.assert_idle()


async def test_an_abort_of_a_queued_request_is_prompt() -> None:
    """A request in the queue is answered at once, with nothing; those before it go on."""
    async with served(max_running=1) as engine:
        runs = engine.generate("runs", limit=5)
        await engine.queued(1)
        waits = engine.generate("waits")
        await engine.queued(2)
        await engine.step()
        await engine.call("/abort_request", {"rid": "waits"})
        status, body = await waits
        assert (status, body["output_ids"], body["meta_info"]["finish_reason"]) == (200, [], ABORTED_QUEUED)
        assert "prompt_tokens" not in body["meta_info"]
        assert body["meta_info"]["output_token_logprobs"] == []
        engine.scheduler.open()
        assert (await runs)[1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_an_abort_matches_by_prefix_once_the_id_is_there() -> None:
    """`job-1` takes `job-10` with it but not `job-2`; an id that nobody has takes nobody."""
    async with served() as engine:
        tasks = {rid: engine.generate(rid, limit=20) for rid in ("job-1", "job-10", "job-2")}
        await engine.queued(3)
        await engine.step(2)
        for rid in ("job-", "job-100", "nope", ""):
            assert await engine.call("/abort_request", {"rid": rid}) == (200, "")
        assert await engine.call("/abort_request", {}) == (200, "")
        await engine.queued(3)
        await engine.call("/abort_request", {"rid": "job-1"})
        assert (await tasks["job-1"])[1]["meta_info"]["finish_reason"] == ABORTED
        assert (await tasks["job-10"])[1]["meta_info"]["finish_reason"] == ABORTED
        engine.scheduler.open()
        assert (await tasks["job-2"])[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


async def test_abort_all_spares_later_arrivals() -> None:
    """Everything in flight ends, running or queued; what comes after runs."""
    async with served(max_running=2) as engine:
        tasks = [engine.generate(f"r{index}") for index in range(4)]
        await engine.queued(4)
        await engine.step()
        assert await engine.call("/abort_request", {"abort_all": True}) == (200, "")
        reasons = [(await task)[1]["meta_info"]["finish_reason"] for task in tasks]
        assert sorted(reasons, key=str) == sorted([ABORTED, ABORTED, ABORTED_QUEUED, ABORTED_QUEUED], key=str)
        engine.scheduler.open()
        assert (await engine.generate("later"))[1]["meta_info"]["finish_reason"]["type"] == "length"
