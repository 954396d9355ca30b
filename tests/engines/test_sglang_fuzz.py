"""Whatever an engine answers, the dialect ends it as a typed outcome."""  # P4

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import Completion, Reply, SGLangDialect
from rollout_svc.errors import SampleFailure, WorkerFailure

DIALECT = SGLangDialect()

statuses = st.sampled_from([200, 200, 200, 400, 404, 429, 500, 503]) | st.integers(-1, 1000)
numbers = st.sampled_from([0, 1, 7, -1, 2**63, -(2**63), 10**30, 1.0, -1.5, math.inf, -math.inf, math.nan, 1.7e308])
scalars = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
pairs = st.lists(st.tuples(scalars, numbers, st.none()), max_size=4)
spans = st.lists(st.fixed_dictionaries({"version": scalars, "start": numbers, "end": numbers}), max_size=3)
finishes = st.fixed_dictionaries({"type": st.sampled_from(["stop", "length", "abort"]) | values})
metas = st.fixed_dictionaries(
    {"finish_reason": finishes | values, "output_token_logprobs": pairs | values},
    optional={"weight_version": values, "weight_versions": spans | values},
)


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """An answer whose ids belong to its logprobs, more often than not."""
    meta = draw(metas)
    drawn = meta["output_token_logprobs"]
    matching = isinstance(drawn, list) and all(isinstance(pair, tuple) for pair in drawn)
    ids = [pair[1] for pair in drawn] if matching and draw(st.booleans()) else draw(values)
    return {"output_ids": ids, "meta_info": meta}


def as_json(content: Any) -> bytes:
    """Write JSON as engines do: infinities as numbers too large, NaN as Python spells it."""
    text = json.dumps(content).replace("-Infinity", "-1e999").replace("Infinity", "1e999")
    return text.encode("utf-8", "surrogatepass")


bodies = st.binary(max_size=200) | values.map(as_json) | nearly_right().map(as_json)
replies = st.builds(Reply, statuses, bodies, st.none() | st.floats(0, 100), st.none())


@given(replies)
def test_a_generation_ends_typed(reply: Reply) -> None:
    """Any status and any bytes: a completion that keeps its promises, or one of the two failures."""  # P4
    try:
        got = DIALECT.parse_generate(reply)
    except (SampleFailure, WorkerFailure):
        return
    assert isinstance(got, Completion)
    assert reply.status == 200
    check_completion(got)


def check_completion(got: Completion) -> None:
    """A completion has ids that are ids, a finite logprob for each, and spans that cover them."""
    assert got.finish_reason in {"stop", "length", "abort"}
    assert len(got.ids) == len(got.logprobs)
    assert all(type(token) is int and token >= 0 for token in got.ids)
    assert all(type(value) in {int, float} and math.isfinite(value) for value in got.logprobs)
    assert isinstance(got.ids, list)
    edge = 0
    for span in got.spans:
        assert span.start == edge < span.end
        assert span.version is None or type(span.version) is int
        edge = span.end
    assert edge == len(got.ids)


@given(nearly_right())
def test_an_answer_that_is_nearly_right_ends_typed(content: dict[str, Any]) -> None:
    """The same for bodies that differ from an answer in a value or two."""  # P4
    test_a_generation_ends_typed.hypothesis.inner_test(Reply(200, as_json(content)))  # type: ignore[attr-defined]


@given(replies)
def test_control_answers_end_typed(reply: Reply) -> None:
    """Label, count and acknowledgement: a value, or the worker's failure."""  # P4
    for parse in (DIALECT.parse_info, DIALECT.parse_loads, DIALECT.parse_done):
        try:
            got = parse(reply)
        except WorkerFailure:
            continue
        assert reply.status == 200
        assert parse != DIALECT.parse_loads or type(got) is int


loads = st.lists(st.fixed_dictionaries({"num_running_reqs": scalars, "num_waiting_reqs": scalars}), max_size=3)


@given(loads)
def test_a_count_is_a_count(ranks: list[dict[str, Any]]) -> None:
    """Idle is believed only of an engine that counted: a sum is a number >= 0 or a failure."""  # P9
    try:
        assert DIALECT.parse_loads(Reply(200, as_json({"loads": ranks}))) >= 0
    except WorkerFailure:
        return
