"""SGLang's streams: cumulative, incremental, cut, broken."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import SGLangDialect
from rollout_svc.engines.sse import DONE, EventSplitter
from rollout_svc.errors import SampleFailure, WorkerFailure

DIALECT = SGLangDialect()


def event(ids: list[int], made: int, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
    """One event: ids, how many were made so far, and how it ended."""
    body = {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": finish,
            "weight_version": "3",
            "completion_tokens": made,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        | meta,
    }
    return json.dumps(body).encode()


STOP = {"type": "stop", "matched": 2}
LENGTH = {"type": "length", "length": 3}
CUMULATIVE = [event([5], 1), event([5, 6], 2), event([5, 6, 7], 3, LENGTH)]
INCREMENTAL = [event([5], 1), event([6], 2), event([7], 3, LENGTH)]


def fed(*payloads: bytes) -> Any:
    """A reader that was given these."""
    reader = DIALECT.reader()
    for payload in payloads:
        reader.feed(payload)
    return reader


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL, CUMULATIVE[-1:], [CUMULATIVE[0], *CUMULATIVE[:]]])
def test_both_kinds_of_stream_are_the_same_answer(events: list[bytes]) -> None:
    """Ids, logprobs and spans do not depend on how the answer came."""
    completion = fed(*events, DONE).completion()
    assert (completion.ids, completion.logprobs, completion.finish_reason) == ([5, 6, 7], [-0.5] * 3, "length")
    assert [tuple(span) for span in completion.spans] == [(3, 0, 3, True)]


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL])
def test_what_came_before_a_cut_is_an_abort(events: list[bytes]) -> None:
    """No stream is taken as whole before its end."""  # P10
    reader = fed(*events[:2])
    partial = reader.partial()
    assert (partial.ids, partial.finish_reason, partial.engine_finish_reason) == ([5, 6], "abort", "abort")
    with pytest.raises(WorkerFailure, match="before its answer did"):
        reader.completion()


def test_a_request_aborted_out_of_the_queue_is_told_its_last_token_once() -> None:
    """The engine repeats it in the last event of an incremental stream."""
    reader = fed(
        event([5], 1), event([6], 2), event([6], 2, {"type": "abort", "message": "Abort in waiting queue"}), DONE
    )
    assert reader.completion().ids == [5, 6]


@pytest.mark.parametrize(("code", "kind"), [(400, SampleFailure), (503, WorkerFailure), (None, WorkerFailure)])
def test_an_error_in_the_stream_is_a_failure(code: int | None, kind: type[Exception]) -> None:
    """After its 200 an engine can only say so in an event; what came before stays."""  # P4
    error = json.dumps({"error": {"message": "no", "code": code}}).encode()
    for events in ([error], [event([5], 1), error], [event([5], 1), event([5, 6], 2), error]):
        reader = fed(*events, DONE)
        with pytest.raises(kind):
            reader.completion()
        assert (reader.partial() is None) == (len(events) == 1)


@given(st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([*CUMULATIVE, *INCREMENTAL, DONE, b"{}", b"[]"]))))
def test_whatever_comes_has_a_typed_outcome(payloads: list[bytes]) -> None:
    """No stream crashes its reader, and a partial has as many logprobs as ids."""  # P4
    reader = fed(*payloads)
    partial = reader.partial()
    assert partial is None or (len(partial.ids) == len(partial.logprobs) > 0 and partial.finish_reason)
    try:
        completion = reader.completion()
    except (SampleFailure, WorkerFailure):
        return
    assert len(completion.ids) == len(completion.logprobs)


@given(st.lists(st.sampled_from([b"one", b"[DONE]", b'{"a":1}']), min_size=1), st.data())
def test_events_are_split_wherever_the_socket_cuts(payloads: list[bytes], data: st.DataObject) -> None:
    """The same payloads come out of any pieces, with either line end, comments and other fields left out."""
    whole = b"".join(b": comment\r\ndata: " + payload + b"\r\n\n" for payload in payloads)
    edges = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter, found = EventSplitter(), []
    for start, end in zip([0, *edges], [*edges, len(whole)], strict=True):
        found += splitter.feed(whole[start:end])
    assert found == payloads
