"""Whatever a vLLM answers, the dialect ends it as a typed outcome."""  # P4

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.engines import Completion, EngineProfile, Health, Reply, VLLMDialect
from rollout_svc.errors import SampleFailure, WorkerFailure
from tests.engines.test_sglang_fuzz import as_json, numbers, replies, scalars, values

DIALECT = VLLMDialect()

spans = st.lists(st.fixed_dictionaries({"version": scalars, "start": numbers, "end": numbers}), max_size=3)
finishes = st.sampled_from(["stop", "length", "abort", "repetition", "error", None])
entries = st.lists(st.fixed_dictionaries({"token_id": numbers, "logprob": scalars}), max_size=4)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """A choice whose ids belong to its logprobs, more often than not."""
    content = draw(entries | values)
    whole = isinstance(content, list) and all(isinstance(entry, dict) and "token_id" in entry for entry in content)
    ids = [entry["token_id"] for entry in content] if whole and draw(st.booleans()) else draw(values)
    logprobs = draw(st.just({"content": content}) | values)
    return {
        "index": 0,
        "finish_reason": draw(finishes | values),
        "token_ids": ids,
        "logprobs": logprobs,
        "weight_versions": draw(spans | values),
    }


bodies = st.fixed_dictionaries(
    {"choices": st.lists(choices(), min_size=1, max_size=2) | values}, optional={"request_id": values}
)
errors = st.fixed_dictionaries({"error": st.fixed_dictionaries({"code": scalars}) | values})
answers = replies | bodies.map(lambda body: Reply(200, as_json(body)))
payloads = st.binary(max_size=100) | (bodies | errors | values).map(as_json) | st.just(b"[DONE]")


def check(got: Completion) -> None:
    """A completion has ids that are ids, a finite logprob for each, and spans that cover them or are none."""
    assert got.finish_reason in {"stop", "length", "abort"}
    assert isinstance(got.ids, list)
    assert len(got.ids) == len(got.logprobs)
    assert all(type(token) is int and token >= 0 for token in got.ids)
    assert all(type(value) in {int, float} and math.isfinite(value) and value > -9999 for value in got.logprobs)
    edge = 0
    for span in got.spans:
        assert span.start == edge < span.end
        assert span.version is None or type(span.version) is int
        edge = span.end
    assert edge == (len(got.ids) if got.spans else 0)
    assert got.labelled or not got.spans


@given(answers)
def test_a_generation_ends_typed(reply: Reply) -> None:
    """Any status and any bytes: a completion that keeps its promises, or one of the two failures."""  # P4
    try:
        got = DIALECT.parse_generate(reply)
    except (SampleFailure, WorkerFailure):
        return
    assert reply.status == 200
    check(got)


@given(st.lists(payloads, max_size=5))
def test_a_stream_ends_typed(parts: list[bytes]) -> None:
    """The same for what comes in parts: reading never fails, and neither does asking for what came."""  # P4, P10
    reader = DIALECT.reader()
    for part in parts:
        reader.feed(part)
        partial = reader.partial()
        if partial is not None:
            check(partial)
            assert partial.ids
    try:
        check(reader.completion())
    except (SampleFailure, WorkerFailure):
        return


@given(answers)
def test_control_answers_end_typed(reply: Reply) -> None:
    """Label, count, health and acknowledgement: a value, or the worker's failure."""  # P4
    for parse in (DIALECT.parse_info, DIALECT.parse_loads, DIALECT.parse_done):
        try:
            got = parse(reply)
        except WorkerFailure:
            continue
        assert reply.status == 200 or parse == DIALECT.parse_info
        assert parse != DIALECT.parse_loads or type(got) is int
    assert isinstance(DIALECT.parse_ping(reply), Health)


GAUGE = 'vllm:num_requests_{}{{engine="0"}} {}\n'


@given(st.lists(st.tuples(st.sampled_from(["running", "waiting", "waiting_by_reason"]), scalars | st.text(max_size=5))))
def test_a_count_is_a_count(lines: list[tuple[str, Any]]) -> None:
    """Idle is believed only of an engine that counted: a sum is a number >= 0 or a failure."""  # P9
    text = "".join(GAUGE.format(*line) for line in lines)
    try:
        assert DIALECT.parse_loads(Reply(200, text.encode("utf-8", "surrogatepass"))) >= 0
    except WorkerFailure:
        return


failures = st.builds(WorkerFailure, st.sampled_from(["connection", "control_timeout"]), st.just("no answer"))
versions = st.fixed_dictionaries({"version": st.just("0.32.0")}).map(lambda body: Reply(200, as_json(body)))
cards = st.fixed_dictionaries(
    {"data": st.lists(st.dictionaries(st.sampled_from(["id", "parent", "max_model_len"]), values))}
)
configs = st.fixed_dictionaries(
    {"vllm_config": st.dictionaries(st.sampled_from(["model_config", "scheduler_config"]), values) | values}
)


@settings(max_examples=40)
@given(
    versions | answers,
    cards.map(lambda body: Reply(200, as_json(body))) | answers,
    st.just(Reply(200, b"")) | answers,
    st.just(Reply(404, b"")) | answers,
    st.lists(answers | failures, min_size=2, max_size=2),
    configs.map(lambda body: Reply(200, as_json(body))) | answers | failures,
)
def test_a_probe_ends_typed(
    version: Reply, models: Reply, abort: Reply, label: Reply, rest: list[Reply | WorkerFailure], info: Any
) -> None:
    """A profile whose every field is of its kind, or the worker's failure."""  # P4
    try:
        got = VLLMDialect().parse_probe([version, models, abort, label, *rest, info])
    except WorkerFailure:
        return
    assert isinstance(got, EngineProfile)
    for text in (got.engine_version, got.model, got.tokenizer, got.weight_label):
        assert text is None or isinstance(text, str)
    for number in (got.context, got.max_running):
        assert number is None or type(number) is int
