"""What a real vLLM answers is what the model says: ids, logprobs, ends, labels and keys."""

from __future__ import annotations

import pytest

from rollout_svc.errors import ConfigError
from tests.vllm.models import TOLERANCE, Oracle
from tests.vllm.server import CONTEXT, SLOTS, Server
from tests.vllm.site import answers, prompt_ids, spans, vllm_stage

COUNT = 6
LENGTH = 48


@pytest.mark.smoke
async def test_sampled_tokens_come_with_the_models_own_logprobs(engine: Server, oracle: Oracle) -> None:
    """At temperature 1 each logprob is the one of a plain forward, to 1e-3, and every token knows its version."""  # P7
    async with vllm_stage(engine, temperature=1.0, max_tokens=LENGTH) as made:
        await made.push(COUNT)
        samples = await answers(made, COUNT)
    for number, sample in enumerate(samples):
        assert sample["prompt_ids"] == prompt_ids(number)
        assert (sample["finish_reason"], len(sample["response_ids"])) == ("length", LENGTH)
        wanted = oracle.logprobs("a", prompt_ids(number), sample["response_ids"])
        assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
        assert spans(sample) == [(0, 0, LENGTH)]
    assert len({tuple(sample["response_ids"]) for sample in samples}) == COUNT


async def test_logprobs_are_those_of_the_policy_that_drew(engine: Server, oracle: Oracle) -> None:
    """At temperature 0.5 they are the tempered ones: the engine was told to say those it drew from."""
    async with vllm_stage(engine, temperature=0.5, max_tokens=LENGTH) as made:
        await made.push(1)
        [sample] = await answers(made)
        profile = made.worker().profile
    assert profile is not None
    assert (profile.logprobs, profile.context, profile.max_running) == ("processed", CONTEXT, SLOTS)
    wanted = oracle.logprobs("a", prompt_ids(0), sample["response_ids"], temperature=0.5)
    assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("stream", [False, True])
async def test_greedy_tokens_are_the_models_first_choices(engine: Server, oracle: Oracle, stream: bool) -> None:
    """At temperature 0, whole or streamed, each token is the likeliest one."""
    async with vllm_stage(engine, max_tokens=LENGTH, stream=stream) as made:
        await made.push(COUNT)
        samples = await answers(made, COUNT)
    for number, sample in enumerate(samples):
        assert oracle.is_greedy("a", prompt_ids(number), sample["response_ids"])
        wanted = oracle.logprobs("a", prompt_ids(number), sample["response_ids"])
        assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
        assert spans(sample) == [(0, 0, LENGTH)]


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: Server) -> None:
    """The token that ended the answer is in it, with its logprob; what is set in `extra` reaches the engine."""
    async with vllm_stage(engine, max_tokens=LENGTH) as made:
        await made.push(1)
        [whole] = await answers(made)
    ids = whole["response_ids"]
    extra = {"ignore_eos": True, "stop_token_ids": [ids[LENGTH // 2]]}
    async with vllm_stage(engine, max_tokens=LENGTH, sampling={"extra": extra}) as made:
        await made.push(1)
        [stopped] = await answers(made)
    end = ids.index(ids[LENGTH // 2]) + 1
    assert stopped["response_ids"] == ids[:end]
    assert len(stopped["logprobs"]) == end
    assert stopped["finish_reason"] == "stop"


@pytest.mark.smoke
async def test_a_wrong_key_is_told_with_the_engines_answer(engine: Server) -> None:
    """A bearer key that is refused ends the start with a line, and costs no sample."""  # P18 P35
    async with vllm_stage(engine, worker={"api_key": "another"}, ready=False) as made:
        with pytest.raises(ConfigError, match=r"workers.0.api_key: w0 at .*: .*Unauthorized") as refused:
            await made.service.ready()
        assert "\n" not in str(refused.value)
        assert (made.samples("admitted"), made.samples("failed")) == (0, 0)
