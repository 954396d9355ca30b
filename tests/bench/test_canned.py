"""The canned engines that benches measure against."""

import random
import statistics

import orjson
import pytest

from bench.bare import WIRES
from bench.canned import lmdeploy, sglang, vllm
from bench.canned.bodies import Bodies
from bench.canned.durations import durations
from rollout_svc.engines import Reply, SGLangDialect

BUILDERS = {"sglang": sglang.answer, "vllm": vllm.answer, "lmdeploy": lmdeploy.answer}


def _body(dialect: str, tokens: int, finish: str) -> bytes:
    bodies = Bodies(BUILDERS[dialect], response_tokens=16, vocab=100, weight_version="3")
    return bodies.body(tokens, finish, b"f" * 32, 128)


@pytest.mark.parametrize("dialect", BUILDERS)
def test_the_bare_client_reads_what_is_canned(dialect: str) -> None:
    """Floor and engine speak the same dialect: as many logprobs as ids, of the length that was asked for."""
    answer = orjson.loads(_body(dialect, 16, "length"))
    ids, logprobs = WIRES[dialect].read(answer)
    assert len(ids) == len(logprobs) == 16
    said = answer["usage"] if dialect == "vllm" else answer["meta_info"]
    assert (said["prompt_tokens"], said["completion_tokens"]) == (128, 16)
    assert said.get("total_tokens", 144) == 144


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_the_service_reads_what_is_canned(finish: str) -> None:
    """A canned answer passes every check of the dialect."""
    completion = SGLangDialect().parse_generate(Reply(200, _body("sglang", 8, finish)))
    assert (len(completion.ids), completion.finish_reason, completion.request_id) == (8, finish, "f" * 32)
    assert [(span.version, span.start, span.end) for span in completion.spans] == [(3, 0, 8)]


@pytest.mark.parametrize("spread", ["fixed", "uniform", "lognormal"])
def test_durations_have_the_mean_they_are_given(spread: str) -> None:
    """However they are spread: the load is the same."""
    draw = durations(spread, 2.0, random.Random(5))
    assert statistics.fmean(draw() for _ in range(20_000)) == pytest.approx(2.0, rel=0.03)
