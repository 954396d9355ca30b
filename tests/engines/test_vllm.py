"""The vLLM dialect against the shapes its engine answers with."""

import json
from typing import Any

import pytest

from rollout_svc.engines import Completion, Reply, VLLMDialect
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import VersionSpan
from tests.engines.vllm_bodies import REQUEST_ID, answer, as_reply, choice, versions

DIALECT = VLLMDialect()


def parsed(reply: Reply) -> Completion:
    return DIALECT.parse_generate(reply)


def refused(reply: Reply) -> str:
    """Parse what must fail as the sample's own failure; returns its reason."""
    with pytest.raises(SampleFailure) as caught:
        DIALECT.parse_generate(reply)
    return caught.value.reason


# -- answers -------------------------------------------------------------------------------------------------


def test_a_recorded_answer() -> None:
    """What vLLM 0.32 was seen to answer: ids and logprobs in order, and the id without what vLLM puts before it."""
    recorded = (
        b'{"request_id":"generate-tokens-job-1","model":"tiny","created":1795221010,"usage":{"prompt_tokens":4,'
        b'"total_tokens":7,"completion_tokens":3,"prompt_tokens_details":null,"completion_tokens_details":null},'
        b'"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":[10,20,30,40],'
        b'"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,'
        b'"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":[374,129,350],"routed_experts":null,"sampling_mask":null,'
        b'"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":{"content":['
        b'{"token_id":374,"logprob":-6.464874267578125,"rank":470,"top_logprobs":[{"token_id":374,'
        b'"logprob":-6.464874267578125,"rank":470}]},{"token_id":129,"logprob":-6.091219902038574,"rank":85,'
        b'"top_logprobs":[{"token_id":129,"logprob":-6.091219902038574,"rank":85}]},{"token_id":350,'
        b'"logprob":-6.155245304107666,"rank":144,"top_logprobs":[{"token_id":350,"logprob":-6.155245304107666,'
        b'"rank":144}]}]}}]}'
    )
    got = parsed(Reply(200, recorded))
    assert got.ids == [374, 129, 350]
    assert got.logprobs == [-6.464874267578125, -6.091219902038574, -6.155245304107666]
    assert (got.finish_reason, got.request_id, got.labelled) == ("length", "job-1", True)
    assert got.spans == (VersionSpan(None, 0, 3),)


@pytest.mark.parametrize(
    ("engine", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("repetition", "stop")]
)
def test_finish_reasons(engine: str, ours: str) -> None:
    """In our words; a repetition is a stop that the sampling asked for. The engine's own word is kept."""
    got = parsed(answer([1, 2], engine))
    assert (got.finish_reason, got.engine_finish_reason) == (ours, engine)


def test_an_abort_in_the_queue() -> None:
    """A request that never ran answers without a token, and without a label."""  # P6
    got = parsed(answer([], "abort"))
    assert (got.ids, got.logprobs, got.spans, got.labelled) == ([], [], (), False)


def test_the_engines_own_error_is_the_workers() -> None:
    """Finish reason `error` says that the engine failed: it may go better elsewhere."""  # P4
    with pytest.raises(WorkerFailure, match="engine_error"):
        parsed(answer([1], "error"))


def test_an_id_of_somebody_else_is_told() -> None:
    """An id without vLLM's prefix, or none, is handed on as it is: the pool compares."""
    body = json.loads(answer([1], "stop").body)
    for sent, told in (("other", "other"), (None, None), (f"generate-tokens-{REQUEST_ID}", REQUEST_ID)):
        assert parsed(as_reply(body | {"request_id": sent})).request_id == told


# -- weight versions -----------------------------------------------------------------------------------------


def test_spans_over_an_update() -> None:
    """A request that was frozen over an update has two."""  # P7
    got = parsed(answer([1, 2, 3], "length", weight_versions=versions(("3", 0, 2), ("4", 2, 3))))
    assert got.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


@pytest.mark.parametrize(("label", "version"), [("default", None), ("7", 7), ("v7", None), ("", None), (7, 7)])
def test_a_label_that_is_no_integer_is_unknown(label: object, version: int | None) -> None:
    """Every token knows the version the engine reported, or that it reported none."""  # P7
    got = parsed(answer([1, 2], "length", weight_versions=versions((label, 0, 2))))
    assert (got.spans, got.labelled) == ((VersionSpan(version, 0, 2),), True)


@pytest.mark.parametrize("reported", [None, [], {}, 0])
def test_without_versions_nothing_is_said(reported: object) -> None:
    """The pool stamps what it dispatched under."""  # P7
    got = parsed(answer([1, 2], "length", weight_versions=reported))
    assert (got.spans, got.labelled) == ((), False)


@pytest.mark.parametrize(
    "reported",
    [
        versions(("3", 0, 1)),
        versions(("3", 1, 2)),
        versions(("3", 0, 1), ("4", 0, 2)),
        versions(("3", 0, 9)),
        [{"version": "3", "start": 0}],
        [{"version": "3", "start": "a", "end": 2}],
        ["3"],
        "3",
        7,
    ],
)
def test_spans_that_do_not_cover_the_answer_are_unknown(reported: object) -> None:
    """A token is never given a version its engine did not clearly report."""  # P7
    assert parsed(answer([1, 2], "length", weight_versions=reported)).spans == (VersionSpan(None, 0, 2),)


# -- statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "hard"),
    [(401, "unauthorized", True), (403, "forbidden", True), (404, "not_found", True), (429, "overloaded", False)]
    + [(status, f"http_{status}", False) for status in (500, 502, 503, 529)],
)
def test_statuses_that_speak_of_the_worker(status: int, kind: str, hard: bool) -> None:
    """Keys, routes, load and a dead engine core are retried elsewhere, with the engine's own wish."""  # P4, P20
    with pytest.raises(WorkerFailure) as caught:
        DIALECT.parse_generate(Reply(status, b'{"error":"Unauthorized"}', retry_after_s=2.5))
    assert (caught.value.kind, caught.value.hard, caught.value.retry_after_s) == (kind, hard, 2.5)


@pytest.mark.parametrize("status", [400, 405, 409, 413, 422])
def test_statuses_that_speak_of_the_sample(status: int) -> None:
    """A refused request is that sample's failure, not the worker's and not the run's."""  # P4
    assert (
        refused(as_reply({"error": {"message": "Token id 999 is out of vocabulary"}}, status)) == "rejected_by_engine"
    )


def test_a_model_that_is_not_there_is_the_samples() -> None:
    """A prompt line that names another model must not take every worker out of traffic."""  # P4, P20
    error = {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
    assert refused(as_reply({"error": error}, 404)) == "rejected_by_engine"


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"", b"[]", b'{"error":"x"}', b'{"error":{"param":null}}'])
def test_any_other_404_is_the_workers(body: bytes) -> None:
    """A route that is not there is."""
    with pytest.raises(WorkerFailure, match="not_found"):
        DIALECT.parse_generate(Reply(404, body))


# -- bodies that are no completion ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["finish_reason", "token_ids", "logprobs"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, True, [None], ["x"], [[]], {"content": None}, {"content": 7}])
def test_fields_of_the_wrong_kind(key: str, value: object) -> None:
    """Wherever the wrong kind of value stands, the answer is invalid and nothing else happens."""  # P4
    assert refused(answer([1, 2], "stop", **{key: value})) == "invalid_response"


@pytest.mark.parametrize("choices", [None, [], [choice([1], "stop")] * 2, [7], {}, "x"])
def test_one_choice(choices: object) -> None:
    """None, two, or what is no choice: invalid."""  # P4
    assert refused(as_reply({"request_id": "x", "choices": choices})) == "invalid_response"


@pytest.mark.parametrize("value", [None, "x", True, [], {}, float("nan"), float("inf"), float("-inf"), 0.01, 1.5])
def test_logprobs_are_finite_numbers_not_above_zero(value: object) -> None:
    """One that is not makes the whole answer invalid."""  # P4
    assert refused(answer([1, 2], "stop", values=[-1.0, value])) == "invalid_response"


@pytest.mark.parametrize("value", [-9999.0, -9999, -1e300])
def test_the_stand_in_for_no_logprob_is_invalid(value: float) -> None:
    """NaN and -infinity are written as -9999.0: such a token has no logprob, and cannot be trained on."""  # P4
    assert refused(answer([1, 2], "stop", values=[-1.0, value])) == "invalid_response"


@pytest.mark.parametrize("token", [-1, 1.5, None, "1", True, [1], 2**64, 1e30])
def test_ids_are_integers_from_zero(token: object) -> None:
    """An id that is no integer >= 0 makes the whole answer invalid."""  # P4
    assert refused(answer([5, token], "stop")) == "invalid_response"


@pytest.mark.parametrize("other", [[1], [1, 2, 3], [2, 1], [1, 3], []])
def test_logprobs_belong_to_the_ids(other: list[Any]) -> None:
    """Too few, too many, of other ids or in another order: invalid."""  # P4
    logprobs = choice(other, "stop")["logprobs"]
    assert refused(changed(logprobs)) == "invalid_response"


def changed(logprobs: Any) -> Reply:
    """An answer of two ids with these logprobs."""
    body = json.loads(answer([1, 2], "stop").body)
    body["choices"][0]["logprobs"] = logprobs
    return as_reply(body)
