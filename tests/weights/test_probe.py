"""A known answer, and who has to give it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.embedded.scheduler import Scheduler
from rollout_svc.errors import BadRequest
from rollout_svc.weights.probe import MAX_PROMPT, MAX_RESPONSE, Probe
from rollout_svc.weights.request import read_source
from tests.embedded.helpers import VOCABULARY, job, plain_logprobs, run_to_end, small_model

GOOD: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -1.5]}
ids = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"prompt_ids": None}, "prompt_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1, -1]}, "prompt_ids.1"),
        ({"prompt_ids": [True]}, "prompt_ids.0"),
        ({"prompt_ids": [1] * (MAX_PROMPT + 1)}, "prompt_ids"),
        ({"response_ids": [3, 4.0]}, "response_ids.1"),
        ({"response_ids": [3]}, "logprobs"),
        ({"response_ids": [3] * (MAX_RESPONSE + 1), "logprobs": [-1.0] * (MAX_RESPONSE + 1)}, "response_ids"),
        ({"logprobs": [-0.5]}, "logprobs"),
        ({"logprobs": "ab"}, "logprobs"),
        ({"logprobs": [-0.5, math.nan]}, "logprobs.1"),
        ({"logprobs": [-math.inf, -0.5]}, "logprobs.0"),
        ({"logprobs": [-0.5, -(10**400)]}, "logprobs.1"),
        ({"tolerance": 0}, "tolerance"),
        ({"tolerance": math.inf}, "tolerance"),
        ({"every": 1}, "every"),
        ({"answer": 1}, "answer"),
    ],
)
def test_a_known_answer_that_is_none_is_refused_at_its_field(change: dict[str, Any], path: str) -> None:
    """P35: lengths that differ, numbers that are not finite, too much of it: 400 before anything is stopped."""
    with pytest.raises(BadRequest) as refused:
        read_source({"kind": "external", "probe": {**GOOD, **change}})
    assert refused.value.detail[0]["path"] == f"source.probe.{path}"


@given(st.lists(ids, min_size=1, max_size=9), st.lists(st.tuples(ids, st.floats(-50, 0)), min_size=1, max_size=9))
def test_what_is_written_is_read_again(prompt: list[int], answer: list[tuple[int, float]]) -> None:
    """P7: and what it knows is not contradicted; another token, or a logprob too far off, is, with both values."""
    made = Probe(tuple(prompt), tuple(token for token, _ in answer), tuple(logprob for _, logprob in answer))
    assert Probe.read(made.as_json()) == made
    found, logprobs = list(made.response_ids), list(made.logprobs)
    assert made.contradicted(found, logprobs) is None
    assert made.contradicted(found, [logprob + 0.009 for logprob in logprobs]) is None
    assert made.contradicted(found[:-1], logprobs[:-1]) is not None
    said = made.contradicted([found[0] + 1, *found[1:]], logprobs)
    assert said is not None
    assert str(found) in said
    for wrong in (logprobs[-1] - 0.02, math.nan):
        said = made.contradicted(found, [*logprobs[:-1], wrong])
        assert said is not None
        assert f"{wrong:.6g}" in said
        assert f"{logprobs[-1]:.6g}" in said


def test_one_is_made_of_a_model() -> None:
    """P7: what the engine generates greedily from the same weights, to a stop token where it makes one."""
    model = small_model(seed=3)
    model.train()
    made = Probe.of(model, [1, 2, 3], tokens=6, every=True, tolerance=0.5)
    assert model.training
    done = run_to_end(Scheduler(small_model(seed=3), VOCABULARY, max_running=1), [job("one", limit=6, temperature=0.0)])
    assert list(made.response_ids) == done["one"].job.ids
    assert list(made.logprobs) == pytest.approx(plain_logprobs(model, done["one"].job), abs=1e-4)
    assert (made.tolerance, made.every, len(made.response_ids)) == (0.5, True, 6)
    short = Probe.of(model, [1, 2, 3], tokens=6, stop={made.response_ids[2]})
    assert short.response_ids == made.response_ids[: made.response_ids.index(made.response_ids[2]) + 1]


def test_weights_that_are_not_finite_make_no_probe() -> None:
    """P35: an answer nobody could give is refused where it is made."""
    model = small_model()
    with torch.no_grad():
        model.norm.bias.fill_(float("nan"))
    with pytest.raises(BadRequest, match=r"probe\.logprobs\.0"):
        Probe.of(model, [1, 2, 3])
