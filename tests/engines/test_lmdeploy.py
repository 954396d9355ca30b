"""The LMDeploy dialect against the shapes its server answers with."""

import json
from typing import Any

import pytest

from rollout_svc.engines import Completion, LMDeployDialect, Reply
from rollout_svc.errors import SampleFailure, WorkerFailure

DIALECT = LMDeployDialect()


def answer(ids: list[Any], finish: Any, *, logprobs: list[Any] | None = None, **meta: Any) -> Reply:
    """Make the reply of a finished call."""
    values = [-1.5] * len(ids) if logprobs is None else logprobs
    info = {
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "finish_reason": finish,
        "output_token_logprobs": [[value, token] for value, token in zip(values, ids, strict=True)] or None,
        "routed_experts": None,
        **meta,
    }
    return body({"text": "", "output_ids": ids, "meta_info": info})


def body(content: Any) -> Reply:
    """Make a 200 with this JSON; what JSON has no word for is written as Python does."""
    return Reply(200, json.dumps(content).encode())


def problem(status: int, message: str) -> Reply:
    """Make an error in the server's envelope."""
    envelope = {"message": message, "type": "x", "code": status, "param": None, "object": "error"}
    return Reply(status, json.dumps(envelope).encode(), 2.5)


def parsed(reply: Reply) -> Completion:
    return DIALECT.parse_generate(reply)


def refused(reply: Reply) -> str:
    """Parse what must fail as the sample's own failure; returns its reason."""
    with pytest.raises(SampleFailure) as caught:
        DIALECT.parse_generate(reply)
    return caught.value.reason


# -- answers -------------------------------------------------------------------------------------------------


def test_stop() -> None:
    """The stop token and its logprob are among the answer's, in order."""
    got = parsed(answer([101, 102, 2], {"type": "stop"}, logprobs=[-1.5, -0.25, 0]))
    assert (got.ids, got.logprobs) == ([101, 102, 2], [-1.5, -0.25, 0])
    assert (got.finish_reason, got.engine_finish_reason) == ("stop", "stop")


def test_length() -> None:
    """A used-up budget is a length."""
    assert parsed(answer([101] * 4, {"type": "length"})).finish_reason == "length"


def test_abort_of_a_running_request() -> None:
    """What an aborted request had made is kept, token by token."""  # P6
    got = parsed(answer(list(range(38)), {"type": "abort"}))
    assert (len(got.ids), got.finish_reason) == (38, "abort")


def test_abort_of_a_waiting_request() -> None:
    """One that never ran has no token, and null where its logprobs would be."""
    got = parsed(answer([], {"type": "abort"}))
    assert (got.ids, got.logprobs, got.finish_reason, got.spans) == ([], [], "abort", ())


def test_nothing_is_said_of_weights() -> None:
    """No version, no label, no id: who sent the request knows, and stamps it."""  # P7
    got = parsed(answer([1], {"type": "stop"}))
    assert (got.spans, got.labelled, got.request_id) == ((), False, None)


# -- statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "hard"),
    [
        (401, "unauthorized", True),
        (403, "forbidden", True),
        (404, "not_found", True),
        (409, "http_409", False),
        (429, "overloaded", False),
        (499, "http_499", False),
        (500, "http_500", False),
        (503, "http_503", False),
    ],
)
def test_statuses_that_speak_of_the_worker(status: int, kind: str, hard: bool) -> None:
    """Keys, routes, load, a session that is taken, a cancellation by others, server errors: retried elsewhere."""  # P4
    with pytest.raises(WorkerFailure) as caught:
        parsed(problem(status, "Engine is sleeping"))
    assert (caught.value.kind, caught.value.hard) == (kind, hard)
    assert "Engine is sleeping" in str(caught.value)


@pytest.mark.parametrize("status", [400, 402, 405, 413, 422])
def test_statuses_that_speak_of_the_sample(status: int) -> None:
    """A refused request is that sample's failure, not the worker's and not the run's."""  # P4
    assert refused(problem(status, "The max_tokens 0 must be a positive integer.")) == "rejected_by_engine"


def test_a_server_without_logprobs_is_unfit() -> None:
    """Restarted without the switch, it fails no sample: the worker is at fault, by name."""  # P4
    words = "return_logprob(True) requested but not enabled logprobs_mode in engine configuration."
    with pytest.raises(WorkerFailure, match="--logprobs-mode") as caught:
        parsed(problem(400, words))
    assert (caught.value.kind, caught.value.hard) == ("unfit", True)


# -- streams -------------------------------------------------------------------------------------------------


def event(ids: list[int], finish: str | None = None, pairs: Any = ...) -> bytes:
    """One event of a stream."""
    meta = {
        "finish_reason": None if finish is None else {"type": finish},
        "output_token_logprobs": ([[-1.5, token] for token in ids] or None) if pairs is ... else pairs,
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def read(*payloads: bytes) -> Any:
    """Feed a reader."""
    reader = DIALECT.reader()
    for payload in payloads:
        reader.feed(payload)
    return reader


@pytest.mark.parametrize(
    ("last", "ids", "finish"), [([], [101, 102, 103], "length"), ([2], [101, 102, 103, 2], "stop"), ([], [], "abort")]
)
def test_a_stream_of_deltas(last: list[int], ids: list[int], finish: str) -> None:
    """Events add up; the last has no token, or the stop token's, and the finish reason."""
    events = [event([101, 102]), event([103])] if ids else []
    got = read(*events, event(last, finish), b"[DONE]").completion()
    assert (got.ids, got.logprobs, got.finish_reason) == (ids, [-1.5] * len(ids), finish)


@pytest.mark.parametrize("payloads", [(), (event([1]),), (event([1]), event([], "length")), (event([1]), b"[DONE]")])
def test_a_stream_that_was_cut_off(payloads: tuple[bytes, ...]) -> None:
    """Without its end it is no answer: the worker's failure, and what came is an abort's."""  # P10
    reader = read(*payloads)
    with pytest.raises(WorkerFailure) as caught:
        reader.completion()
    assert (caught.value.kind, caught.value.accepted) == ("cut_off", True)
    partial = reader.partial()
    assert (partial and partial.ids) == ([1] if payloads else None)
    assert partial is None or partial.finish_reason == (
        "length" if len(payloads) == 2 and payloads[1][0] == 123 else "abort"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "boom", "type": "server_error", "code": 500, "param": None, "object": "error"}, WorkerFailure),
        ({"message": "gone", "type": "invalid_request_error", "code": 499}, WorkerFailure),
        ({"message": "too long", "type": "invalid_request_error", "code": 400}, SampleFailure),
        ({"message": "odd"}, WorkerFailure),
        ("odd", WorkerFailure),
    ],
)
def test_an_error_in_a_stream(error: Any, kind: type[Exception]) -> None:
    """Its code means what a status would have meant; the tokens before it are not lost."""  # P4, P10
    reader = read(event([1, 2]), json.dumps({"error": error}).encode(), b"[DONE]")
    with pytest.raises(kind):
        reader.completion()
    assert reader.partial().ids == [1, 2]


@pytest.mark.parametrize(
    "odd",
    [b"", b"{not json", b"[]", b"7", b"null", b"{}", event([5, 6], None, [[-1.0, 5]]), event([5], None, None)],
)
def test_an_odd_event(odd: bytes) -> None:
    """The answer is invalid; no event of it is taken after the odd one, whatever it was."""  # P4
    reader = read(event([1, 2]), odd, event([3]), event([], "length"), b"[DONE]")
    with pytest.raises(SampleFailure):
        reader.completion()


def test_what_came_before_an_event_that_is_no_json_is_kept() -> None:
    """Half an event is nothing; the whole ones before it are the request's tokens."""  # P10
    assert read(event([1, 2]), b'{"text": "", "output_i').partial().ids == [1, 2]
