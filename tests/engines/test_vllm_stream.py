"""The vLLM dialect reads streams of deltas."""

import json

import pytest

from rollout_svc.engines import Completion, VLLMDialect
from rollout_svc.engines.vllm_answers import VLLMStream
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import VersionSpan
from tests.engines.vllm_bodies import REQUEST_ID, choice, chunk, versions

DONE = b"[DONE]"


def read(*payloads: bytes) -> VLLMStream:
    """Feed a new reader."""
    reader = VLLMDialect().reader()
    for payload in payloads:
        reader.feed(payload)
    return reader


def some(completion: Completion | None) -> Completion:
    """What must be there."""
    assert completion is not None
    return completion


ERROR = json.dumps({"error": {"message": "EngineCore encountered an issue.", "code": 500}}).encode()


def test_deltas_are_joined() -> None:
    """Ids and logprobs in order; the versions of the last chunk are those of all."""  # P7
    last = chunk([3], "length", weight_versions=versions(("6", 0, 1), ("7", 1, 3)))
    got = read(chunk([1], values=[-0.5]), chunk([2]), last, DONE).completion()
    assert (got.ids, got.logprobs) == ([1, 2, 3], [-0.5, -1.5, -1.5])
    assert (got.finish_reason, got.request_id, got.labelled) == ("length", REQUEST_ID, True)
    assert got.spans == (VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))


def test_an_abort_ends_with_a_chunk_without_tokens() -> None:
    """What was made is kept, under what it was made."""  # P6
    got = read(chunk([1, 2]), chunk([], "abort", weight_versions=versions(("7", 0, 2))), DONE).completion()
    assert (got.ids, got.finish_reason, got.spans) == ([1, 2], "abort", (VersionSpan(7, 0, 2),))


def test_an_abort_in_the_queue() -> None:
    """One chunk, no token."""
    assert read(chunk([], "abort", weight_versions=[]), DONE).completion().ids == []


def test_usage_is_passed_over() -> None:
    """A chunk without choices says nothing of the answer."""
    usage = b'{"request_id":"x","usage":{"prompt_tokens":4},"output_mode":"tokens","choices":[]}'
    assert read(usage, chunk([1], "stop"), usage, DONE).completion().ids == [1]


def test_a_stream_that_was_cut() -> None:
    """No whole answer, but what came is kept: as an abort, under no version, to be stamped."""  # P10
    reader = read(chunk([1]), chunk([2]))
    with pytest.raises(WorkerFailure) as caught:
        reader.completion()
    assert (caught.value.kind, caught.value.accepted) == ("cut_off", True)
    got = some(reader.partial())
    assert (got.ids, got.finish_reason, got.spans, got.labelled) == ([1, 2], "abort", (), False)
    assert got.request_id == REQUEST_ID


def test_a_stream_that_was_cut_after_its_answer() -> None:
    """What was whole is whole, `[DONE]` or not."""
    reader = read(chunk([1]), chunk([2], "stop", weight_versions=versions(("7", 0, 2))))
    for got in (reader.completion(), some(reader.partial())):
        assert (got.finish_reason, got.spans) == ("stop", (VersionSpan(7, 0, 2),))


@pytest.mark.parametrize("payloads", [(), (DONE,), (chunk([]),), (chunk([], "abort"),)])
def test_nothing_is_no_part_of_an_answer(payloads: tuple[bytes, ...]) -> None:
    """Where no token came there is nothing to keep."""
    assert read(*payloads).partial() is None


def test_an_error_after_the_200() -> None:
    """The engine core died: the worker's failure, and the tokens before it are kept."""  # P10, P19
    reader = read(chunk([1, 2]), ERROR, DONE)
    with pytest.raises(WorkerFailure, match="http_500"):
        reader.completion()
    assert some(reader.partial()).ids == [1, 2]


def test_an_error_that_speaks_of_the_sample() -> None:
    """Its code means what a status would have."""
    with pytest.raises(SampleFailure, match="rejected_by_engine"):
        read(b'{"error":{"message":"no","code":400}}', DONE).completion()


@pytest.mark.parametrize("code", [200, None, "500", True])
def test_an_error_without_a_code_that_says_anything(code: object) -> None:
    """Is the worker's."""
    with pytest.raises(WorkerFailure, match="http_500"):
        read(json.dumps({"error": {"message": "no", "code": code}}).encode(), DONE).completion()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"error":7}',
        b'{"choices":[7]}',
        json.dumps({"choices": [choice([1], None), choice([1], None)]}).encode(),
        chunk([1], "weather"),
        chunk([1], 7),
        chunk([-1]),
        chunk([1], values=[-9999.0]),
        chunk([1], values=[float("nan")]),
        chunk([1], logprobs=None),
        chunk([1, 2], logprobs={"content": []}),
    ],
)
def test_garbage_makes_the_answer_invalid(payload: bytes) -> None:
    """Wherever it stands: what follows is not read, and what came before is not kept."""  # P4
    reader = read(chunk([1]), payload, chunk([2], "stop"), DONE)
    with pytest.raises(SampleFailure, match="invalid_response"):
        reader.completion()
    assert reader.partial() is None


def test_nothing_follows_an_end() -> None:
    """Tokens after the finish reason are no answer of an engine that counts."""  # P4
    with pytest.raises(SampleFailure, match="went on"):
        read(chunk([1], "stop"), chunk([2], "stop"), DONE).completion()


def test_what_was_handed_out_does_not_change() -> None:
    """A partial answer is a copy."""
    reader = read(chunk([1]))
    before = some(reader.partial())
    reader.feed(chunk([2]))
    assert (before.ids, some(reader.partial()).ids) == ([1], [1, 2])
