"""Whatever an engine answers, the LMDeploy dialect ends it as a typed outcome."""  # P4

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import Completion, EngineProfile, Health, LMDeployDialect, Reply
from rollout_svc.engines.lmdeploy_probe import PROBE
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import VersionSpan
from tests.engines.test_sglang_fuzz import as_json, check_completion, finishes, numbers, replies, scalars, values

DIALECT = LMDeployDialect()

pairs = st.lists(st.tuples(scalars, numbers), max_size=4)
metas = st.fixed_dictionaries({"finish_reason": finishes | values, "output_token_logprobs": pairs | values})


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """An answer whose ids belong to its logprobs, more often than not."""
    meta = draw(metas)
    drawn = meta["output_token_logprobs"]
    matching = isinstance(drawn, list) and all(isinstance(pair, tuple) for pair in drawn)
    ids = [pair[1] for pair in drawn] if matching and draw(st.booleans()) else draw(values)
    return {"output_ids": ids, "meta_info": meta}


def check_unlabelled(got: Completion) -> None:
    """What a completion promises, without spans: whoever sent the request stamps them."""
    assert (got.spans, got.labelled, got.request_id) == ((), False, None)
    stamped = (VersionSpan(None, 0, len(got.ids)),) if got.ids else ()
    check_completion(replace(got, spans=stamped))


@given(replies | nearly_right().map(lambda content: Reply(200, as_json(content))))
def test_a_generation_ends_typed(reply: Reply) -> None:
    """Any status and any bytes: a completion that keeps its promises, or one of the two failures."""  # P4
    try:
        got = DIALECT.parse_generate(reply)
    except (SampleFailure, WorkerFailure):
        return
    assert reply.status == 200
    check_unlabelled(got)


events = st.lists(
    (nearly_right().map(as_json)) | values.map(as_json) | st.binary(max_size=60) | st.just(b"[DONE]"), max_size=6
)


@given(events)
def test_a_stream_ends_typed(payloads: list[bytes]) -> None:
    """Any events: a completion or one of the failures; what is partial has tokens, and all that came."""  # P4
    reader = DIALECT.reader()
    for payload in payloads:
        reader.feed(payload)
    partial = reader.partial()
    assert partial is None or partial.ids
    try:
        got = reader.completion()
    except (SampleFailure, WorkerFailure):
        return
    check_unlabelled(got)
    assert partial is None or partial.ids == got.ids


@given(replies)
def test_control_answers_end_typed(reply: Reply) -> None:
    """Process, acknowledgement, health: a value, or the worker's failure."""  # P4
    for parse in (DIALECT.parse_info, DIALECT.parse_loads, DIALECT.parse_done):
        try:
            parse(reply)
        except WorkerFailure:
            continue
    assert isinstance(DIALECT.parse_ping(reply), Health)


probes = st.lists(
    replies | st.builds(WorkerFailure, st.sampled_from(["connection", "control_timeout"]), st.text(max_size=5)),
    min_size=len(PROBE),
    max_size=len(PROBE),
)
served = st.sampled_from(
    [
        b'{"data":[{"id":"m","owned_by":"lmdeploy"}]}',
        b'{"data":[{"id":1,"owned_by":"lmdeploy"}]}',
        b'{"data":{}}',
        b'{"data":[[]]}',
        b'{"data":[{"id":"m"}]}',
    ]
)


@given(probes, served | st.none())
def test_a_probe_ends_typed(answers: list[Reply | WorkerFailure], models: bytes | None) -> None:
    """Whoever answers: a profile, or the worker's failure."""  # P4
    if models is not None:
        answers[0] = Reply(200, models)
    try:
        assert isinstance(DIALECT.parse_probe(answers), EngineProfile)
    except WorkerFailure:
        return
