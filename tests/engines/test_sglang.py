"""The SGLang dialect against the shapes its engine answers with."""

import json
from typing import Any

import pytest

from rollout_svc.engines import Completion, Reply, SGLangDialect
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import VersionSpan

DIALECT = SGLangDialect()


def answer(
    ids: list[Any], finish: Any, *, logprobs: list[Any] | None = None, drop: tuple[str, ...] = (), **meta: Any
) -> Reply:
    """Make the reply of a finished call; `drop` leaves keys of meta_info out."""
    values = [-1.5] * len(ids) if logprobs is None else logprobs
    info = {
        "id": "0" * 32,
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)],
        "output_token_logprobs_length": len(ids),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        **meta,
    }
    for key in drop:
        del info[key]
    return body({"text": "x" * len(ids), "output_ids": ids, "meta_info": info})


def body(content: Any) -> Reply:
    """Make a 200 with this JSON; what JSON has no word for is written as Python does."""
    return Reply(200, json.dumps(content).encode())


def parsed(reply: Reply) -> Completion:
    return DIALECT.parse_generate(reply)


def refused(reply: Reply) -> str:
    """Parse what must fail as the sample's own failure; returns its reason."""
    with pytest.raises(SampleFailure) as caught:
        DIALECT.parse_generate(reply)
    return caught.value.reason


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matched", [2, "END"])
def test_stop(matched: object) -> None:
    """A stop by token or by text is a stop; ids and logprobs are the engine's, in order."""
    reply = answer([101, 102, 2], {"type": "stop", "matched": matched}, logprobs=[-1.5, -0.25, 0])
    got = parsed(reply)
    assert (got.ids, got.logprobs) == ([101, 102, 2], [-1.5, -0.25, 0])
    assert (got.finish_reason, got.engine_finish_reason) == ("stop", "stop")


def test_length() -> None:
    """A used-up budget is a length."""
    assert parsed(answer([101] * 4, {"type": "length", "length": 4})).finish_reason == "length"


def test_abort_of_a_running_request() -> None:
    """What an aborted request had made is kept, token by token."""  # P6
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    got = parsed(answer(list(range(35)), finish))
    assert (len(got.ids), got.finish_reason) == (35, "abort")


@pytest.mark.parametrize("ids", [[], [101, 102]])
def test_abort_in_the_waiting_queue(ids: list[int]) -> None:
    """A queued request answers without `prompt_tokens` and `cached_tokens`; one that had run keeps its tokens."""
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    got = parsed(answer(ids, finish, drop=("prompt_tokens", "cached_tokens", "num_retractions")))
    assert (got.ids, got.finish_reason) == (ids, "abort")
    assert got.spans == ((VersionSpan(None, 0, 2),) if ids else ())


# -- weight versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "version"), [("default", None), ("7", 7), (7, 7), ("v7", None), ("", None), (None, None), (7.5, None)]
)
def test_a_label_that_is_no_integer_is_unknown(label: object, version: int | None) -> None:
    """Every token knows the version the engine reported, or that it reported none."""  # P7
    assert parsed(answer([1, 2], {"type": "length"}, weight_version=label)).spans == (VersionSpan(version, 0, 2),)


def test_spans_over_an_update() -> None:
    """Where the engine tells spans, they count and not the label it ended with."""  # P7
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    got = parsed(answer([1, 2, 3], {"type": "length"}, weight_version="4", weight_versions=spans))
    assert got.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


def test_empty_spans_are_left_out() -> None:
    """A version that made no token does not appear."""
    spans = [{"version": "3", "start": 0, "end": 0}, {"version": "4", "start": 0, "end": 2}]
    assert parsed(answer([1, 2], {"type": "length"}, weight_versions=spans)).spans == (VersionSpan(4, 0, 2),)


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "3", "start": 0, "end": 1}],
        [{"version": "3", "start": 1, "end": 2}],
        [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 0, "end": 2}],
        [{"version": "3", "start": 0, "end": 9}],
        [{"version": "3", "start": 0}],
        [{"version": "3", "start": "a", "end": 2}],
        [{"version": "3", "start": None, "end": 2}],
        ["3"],
        "3",
        7,
        {"version": "3"},
    ],
)
def test_spans_that_do_not_cover_the_answer_are_unknown(spans: object) -> None:
    """A token is never given a version its engine did not clearly report."""  # P7
    got = parsed(answer([1, 2], {"type": "length"}, weight_version="3", weight_versions=spans))
    assert got.spans == (VersionSpan(None, 0, 2),)


@pytest.mark.parametrize("end", ["1e999", "-1e999", "NaN"])
def test_spans_of_no_finite_length_are_no_crash(end: str) -> None:
    """A number beyond all bounds in a span leaves the answer typed."""  # P4
    spans = [{"version": "3", "start": 0, "end": 77}]
    reply = answer([1, 2], {"type": "length"}, weight_versions=spans)
    assert refused(Reply(200, reply.body.replace(b"77", end.encode()))) == "invalid_response"


# -- statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "hard"),
    [
        (401, "unauthorized", True),
        (403, "forbidden", True),
        (404, "not_found", True),
        (429, "overloaded", False),
        (500, "http_500", False),
        (502, "http_502", False),
        (503, "http_503", False),
        (529, "http_529", False),
        (599, "http_599", False),
        (777, "http_777", False),
    ],
)
def test_statuses_that_speak_of_the_worker(status: int, kind: str, hard: bool) -> None:
    """Keys, routes, load and server errors are retried elsewhere, with the engine's own wish."""  # P4, P20
    with pytest.raises(WorkerFailure) as caught:
        DIALECT.parse_generate(Reply(status, b'{"error": "Unauthorized"}', retry_after_s=2.5))
    failure = caught.value
    assert (failure.kind, failure.hard, failure.retry_after_s) == (kind, hard, 2.5)
    assert "Unauthorized" in str(failure)


@pytest.mark.parametrize("status", [400, 402, 405, 409, 413, 418, 422, 499])
def test_statuses_that_speak_of_the_sample(status: int) -> None:
    """A refused request is that sample's failure, not the worker's and not the run's."""  # P4
    assert refused(Reply(status, b'{"error": {"message": "too long"}}')) == "rejected_by_engine"


# -- bodies that are no completion ---------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "valid"), [(0, True), (0.0, True), (1e-4, True), (0.01, False), (1.5, False)])
def test_a_logprob_is_not_above_zero(value: float, valid: bool) -> None:
    """No probability is above 1, but for what rounding adds."""  # P4
    reply = answer([1, 2], {"type": "stop"}, logprobs=[-1.0, value])
    assert parsed(reply).logprobs[1] == value if valid else refused(reply) == "invalid_response"


@pytest.mark.parametrize("numbers", ["1e999,-1e999", "1e999,1.0", "1.7e308,1.7e308", "-1e999,-1.0"])
def test_logprobs_beyond_all_bounds(numbers: str) -> None:
    """Infinities that would cancel out, and sums that overflow, are no crash."""  # P4
    one, other = numbers.split(",")
    raw = answer([1, 2], {"type": "stop"}, logprobs=[77.5, 88.5]).body
    assert refused(Reply(200, raw.replace(b"77.5", one.encode()).replace(b"88.5", other.encode())))
