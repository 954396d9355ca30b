"""What a journal keeps of samples and prompts comes back as it was."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from rollout_svc.buffer.journal.records import (
    decode_ids,
    decode_prompt,
    decode_sample,
    encode_ids,
    encode_prompt,
    encode_sample,
    state_json,
)
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SampleStatus
from rollout_svc.sample.state import SampleState
from rollout_svc.segment import Segment, VersionSpan
from tests.support.groups import make_sample, run_to, segment

TOKENS = st.integers(0, 2**40) | st.integers(0, 150_000)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
META = st.dictionaries(st.text(max_size=6), JSON, max_size=3)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """A segment: of the model, with one span or more, or of the environment."""
    ids = draw(st.lists(TOKENS, min_size=1, max_size=8))
    turn = draw(st.integers(0, 3))
    if not draw(st.booleans()):
        return Segment(ids, [0.0] * len(ids), (), by_model=False, turn=turn)
    cuts = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=2))})
    versions = st.none() | st.integers(0, 2**40)
    spans = [VersionSpan(draw(versions), start, end, draw(st.booleans())) for start, end in itertools.pairwise(cuts)]
    return Segment(ids, draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids))), tuple(spans), turn=turn)


UNFINISHED = st.builds(
    SampleState,
    status=st.sampled_from(["INIT", "GENERATING", "GENERATED", "JUDGING", "ABORTED"]),
    attempt=st.integers(0, 1000),
    failures=st.integers(0, 3),
    turn=st.integers(0, 3),
    resume_at=st.sampled_from([None, "generate", "judge"]),
    finish_reason=st.sampled_from([None, "stop", "abort"]),
    engine_finish_reason=st.none() | st.text(max_size=8),
    segments=st.lists(segments(), max_size=3).map(tuple),
    meta=META,
    reward=st.none(),
    reward_parts=st.none(),
    packed=st.none(),
    length=st.just(0),
    spans=st.just(()),
    experts=st.none(),
    prompt_ids=st.none(),
    earlier=st.just(()),
    earlier_spans=st.just(()),
)


def there_and_back(state: SampleState) -> SampleState:
    """Write a sample and read it."""
    return decode_sample(state.status, *encode_sample(state, state_json(state)))


@given(UNFINISHED)
def test_an_unfinished_sample_comes_back(state: SampleState) -> None:
    """Segments of several turns and versions, bit for bit, and all that goes with them."""  # P31
    assert there_and_back(state) == state


@given(st.lists(segments(), max_size=4), META, FLOATS, st.dictionaries(st.text(max_size=4), FLOATS, max_size=2))
def test_a_completed_sample_comes_back_byte_for_byte(
    made: list[Segment], meta: dict[str, Any], reward: float, parts: dict[str, float]
) -> None:
    """Its record, its length and its versions are those it had."""  # P31
    sample = make_sample(Ledger())
    sample.meta = meta
    attempt = sample.hand_out()
    for part in made:
        sample.extend(attempt, part)
    sample.transition(attempt, SampleStatus.GENERATED)
    sample.transition(attempt, SampleStatus.JUDGING)
    sample.response = "text"
    sample.grade(attempt, reward, parts)
    state = sample.state()
    found = there_and_back(state)
    assert found.packed == state.packed
    assert (found.length, found.spans) == (state.length, state.spans)
    assert (found.reward, found.reward_parts, found.attempt) == (reward, parts or None, attempt)
    assert orjson.dumps(found.meta) == orjson.dumps(meta)


def test_tokens_are_tensors() -> None:
    """Ids in 32 bits where they fit, logprobs in 64: any reader of safetensors can read them."""
    _, blob = encode_sample(SampleState(status="ABORTED", segments=(segment([7, 8]),)), b"{}")
    tensors = load(blob or b"")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "ids": np.int32,
        "logprobs": np.float64,
        "segments": np.int64,
        "spans": np.int64,
    }
    assert tensors["ids"].tolist() == [7, 8]
    sample = make_sample(Ledger())
    run_to(sample, SampleStatus.COMPLETED)
    _, blob = encode_sample(sample.state(), None)
    assert load(blob or b"")["record"].tobytes() == sample.packed


def test_what_an_agent_left_in_meta_does_not_keep_a_sample_from_being_written() -> None:
    """What cannot be written down is left out, the tokens are not."""
    state = SampleState(status="ABORTED", segments=(segment([7]),), meta={"tool": object()})
    assert there_and_back(state) == state._replace(meta=None)


def test_tokens_that_are_none_are_left_out() -> None:
    """An agent's own tokens may be anything: such a sample begins again instead of ending the journal."""
    odd: list[Any] = ["seven"]
    state = SampleState(status="ABORTED", segments=(Segment(odd, [0.0], (), by_model=False),), meta={})
    assert there_and_back(state) == state._replace(segments=())


@given(st.lists(TOKENS, max_size=20), JSON, JSON, META, META)
def test_a_prompt_comes_back(ids: list[int], content: Any, truth: Any, meta: Any, extra: Any) -> None:
    """Its line and its ids."""
    prompt = Prompt("p", "t", ids, content, truth, meta, extra)
    assert decode_prompt("p", "t", encode_prompt(prompt), encode_ids(ids)) == prompt
    assert decode_ids(encode_ids(ids)) == ids


def test_what_was_under_way_is_handed_back() -> None:
    """Each status goes on where a pause would have left it: its judge, its tokens, or its prompt."""  # P31
    tokens = (segment([7]),)
    assert SampleState(status="JUDGING", segments=tokens).handed_back().resume_at == "judge"
    assert SampleState(status="GENERATED", segments=tokens).handed_back().status == "ABORTED"
    cut = SampleState(status="GENERATING", segments=tokens, failures=1).handed_back()
    assert (cut.status, cut.resume_at, cut.segments, cut.failures) == ("ABORTED", "generate", tokens, 1)
    assert SampleState(status="GENERATING", attempt=2, failures=1).handed_back() == SampleState(attempt=2, failures=1)
    done = SampleState(status="COMPLETED", packed=b"{}")
    assert done.handed_back() is done
