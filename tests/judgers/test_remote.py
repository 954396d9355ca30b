"""`http` and `llm`: verdicts from services behind real sockets, and what is no verdict."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_judgers.http import Http
from rollout_judgers.llm import Llm, fill, read_score
from rollout_judgers.remote import retry_after_s
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.judging import JudgeFailed, Reward
from tests.support.court import Court, a_sample
from tests.support.reward_service import RewardService, Said, reward_service

GOOD = Said({"reward": 0.5})


@asynccontextmanager
async def asked_over_http(*answers: Said, **options: Any) -> AsyncIterator[tuple[Http, RewardService]]:
    """Serve answers, with a judger that asks for them."""
    async with reward_service(*answers) as service:
        judger = Http(url=f"{service.url}/judge", **options)
        try:
            yield judger, service
        finally:
            await judger.close()


# -- http ----------------------------------------------------------------------------------------------------


async def test_a_sample_is_posted_and_its_reward_read() -> None:
    """Everything a judger sees of a sample goes there; a number and its parts come back."""
    answer = Said({"result": {"score": 0.25, "why": [{"a": 1}]}})
    options = {"reward": "result.score", "parts": "result.why.0", "api_key": "k", "headers": {"X-Team": "t"}}
    async with asked_over_http(answer, **options) as (judger, service):
        assert await judger.judge(a_sample()) == Reward(0.25, {"a": 1})
    [body], [headers] = service.asked, service.headers
    assert (body["sample_id"], body["response"], body["response_ids"], body["ground_truth"]) == (
        *("s0", "text", [2, 3], "truth"),
    )
    assert (headers["Authorization"], headers["X-Team"]) == ("Bearer k", "t")


@pytest.mark.parametrize(
    "passing", [Said(status=503), Said(status=500), Said(status=429, headers={"Retry-After": "0"}), Said(cut=True)]
)
async def test_what_may_pass_is_tried_again(passing: Said) -> None:
    """A service that is busy, broken or gone for a moment costs a try, not a sample."""  # P20
    async with asked_over_http(passing, GOOD) as (judger, service):
        assert (await judger.judge(a_sample())).value == 0.5
    assert len(service.asked) == 2


async def test_tries_are_counted_and_the_service_says_when() -> None:
    """A service that stays down is a failure that says so, after as many tries as asked for, when it asked for them."""
    # P20
    async with asked_over_http(Said({"odd": 1}, 503, {"Retry-After": "0"}), tries=7) as (judger, service):
        async with asyncio.timeout(4):  # our own distances would add up to twice as much
            with pytest.raises(JudgeFailed, match=r"http_503: .*odd.*7 times"):
                await judger.judge(a_sample())
    assert len(service.asked) == 7


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Said(status=404), "http_404"),
        (Said(status=400), "http_400"),
        (Said(status=204), "http_204"),
        (Said(status=302, headers={"Location": "/elsewhere"}), "http_302"),
        (Said("no json"), "invalid_answer"),
        (Said({"other": 1}), "there is no reward"),
        (Said([]), "there is no reward"),
        (Said("1" * (1 << 21)), "more than"),
    ],
)
async def test_what_is_no_verdict_is_a_failure_at_once(answer: Said, told: str) -> None:
    """Nothing else is tried again, and nothing becomes a 0."""  # P2, P21
    async with asked_over_http(answer) as (judger, service):
        with pytest.raises(JudgeFailed, match=told):
            await judger.judge(a_sample())
    assert len(service.asked) == 1


@pytest.mark.parametrize("value", ["1.0", None, [1]])
async def test_a_reward_that_is_no_number_is_typed(value: Any) -> None:
    """A text, a list or nothing at the place of the reward is refused by name."""  # P2
    async with asked_over_http(Said({"reward": value})) as (judger, _):
        with pytest.raises(SampleFailure, match="judge_invalid"):
            await Court(judger).ask()


async def test_cancelling_leaves_the_service_at_once() -> None:
    """A judge that is no longer wanted closes its request, whatever the service does."""  # P14
    async with asked_over_http(Said(hang=True)) as (judger, service):
        call = asyncio.create_task(judger.judge(a_sample()))
        await service.came.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(10):
            await service.left.wait()


async def test_nobody_there_is_a_failure() -> None:
    """A refused connection is tried again, and then told with its address."""  # P20
    async with reward_service(GOOD) as service:
        url = service.url
    judger = Http(url=url, tries=2)
    with pytest.raises(JudgeFailed, match=r"unreachable: http://127.*2 times"):
        await judger.judge(a_sample())
    await judger.close()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("7", 7.0), ("soon", None), ("-3", None), ("Wed, 21 Oct 2026 07:28:00 GMT", 60.0), ("²", None)],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    """Both forms are read; what says nothing leaves the wait to us."""  # P20
    assert retry_after_s(value, datetime(2026, 10, 21, 7, 27, tzinfo=UTC)) == seconds


# -- llm -----------------------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {"model": "m", "rubric": "Q: {prompt}\nA: {response}\nT: {ground_truth}\nJSON: {}"}


def says(text: Any) -> Said:
    """Make a completion of an OpenAI-compatible API."""
    return Said({"choices": [{"message": {"role": "assistant", "content": text}}]})


@asynccontextmanager
async def asked_of_a_model(*answers: Said, **options: Any) -> AsyncIterator[tuple[Llm, RewardService]]:
    """Serve completions, with a judger that asks for them."""
    async with reward_service(*answers) as service:
        judger = Llm(**{**MODEL, "base_url": f"{service.url}/v1/", **options})
        try:
            yield judger, service
        finally:
            await judger.close()


async def test_a_model_judges_by_a_rubric() -> None:
    """The rubric is filled in and sent; the last score it says is put between 0 and 1."""
    options = {"scale": [1, 5], "system": "be fair", "api_key": "k", "sampling": {"max_tokens": 9}}
    async with asked_of_a_model(Said(status=503), says("Score: 1? No.\nScore: 4"), **options) as (judger, service):
        assert await judger.judge(a_sample(response="{truth}")) == Reward(0.75, {"score": 4.0})
    body = service.asked[-1]
    assert (len(service.asked), service.paths[-1]) == (2, "/v1/chat/completions")
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"] == "Q: \nA: {truth}\nT: truth\nJSON: {}"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 9)
    assert service.headers[-1]["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        ({}, "it is good", "unparseable"),
        ({}, "score: 7", "off_scale"),
        ({"scale": [1, 5]}, "score: 0", "off_scale"),
        ({}, None, "invalid_answer"),
        ({"field": "score"}, "score: 1", "unparseable"),
        ({"field": "score"}, '{"score": "1"}', "unparseable"),
        ({"field": "score"}, '{"score": true}', "unparseable"),
        ({"field": "a.b"}, '{"a": 1}', "unparseable"),
        ({"pattern": "<(.*)>"}, "<one>", "unparseable"),
        ({"pattern": "<(.*)>"}, "<nan>", "off_scale"),
    ],
)
async def test_a_score_that_cannot_be_read_is_never_0(options: dict[str, Any], text: Any, told: str) -> None:
    """A model that says something else is a judge without a verdict."""  # P2
    async with asked_of_a_model(says(text), **options) as (judger, _):
        with pytest.raises(SampleFailure, match=f"judge_error: j: {told}"):
            await Court(judger).ask()


@pytest.mark.parametrize("text", ['{"a": {"score": 2}}', 'So:\n```json\n{"a": {"score": 2}}\n```\n'])
def test_a_field_of_json_is_read(text: str) -> None:
    """Bare or fenced."""
    assert read_score(text, "a.score") == 2.0


@given(st.text(alphabet="{}respon_tgu ", max_size=30), st.text(alphabet="{}response", max_size=20))
def test_what_a_sample_says_is_not_filled_in_again(response: str, truth: str) -> None:
    """A response that speaks of `{ground_truth}` does not see it."""
    filled = fill("<{response}|{ground_truth}>", a_sample(response=response, truth=truth))
    assert filled == f"<{response}|{truth}>"


def test_prompts_are_told_as_they_were_spoken() -> None:
    """Messages are who says what; other content is JSON."""
    sample = a_sample(truth={"a": 1})
    object.__setattr__(sample, "prompt", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    assert fill("{prompt} {ground_truth}", sample) == 'user: Hi\n\nassistant: Yes? {"a":1}'


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (lambda: Http(url="ftp://x"), "url"),
        (lambda: Http(url="http://x y"), "url"),
        (lambda: Http(url="http://x", tries=0), "tries"),
        (lambda: Http(url="http://x", reward=""), "reward"),
        (lambda: Http(url="http://x", headers={"a": 1}), "headers"),  # type: ignore[dict-item]
        (lambda: Http(url="http://x", api_key=""), "api_key"),
        (lambda: Llm(**MODEL, base_url=""), "base_url"),
        (lambda: Llm(**{**MODEL, "rubric": "good?"}, base_url="http://x"), "rubric"),
        (lambda: Llm(**MODEL, base_url="http://x", scale=[1, 1]), "scale"),
        (lambda: Llm(**MODEL, base_url="http://x", scale=[1]), "scale"),
        (lambda: Llm(**MODEL, base_url="http://x", scale=[0, float("inf")]), "scale.1"),
        (lambda: Llm(**MODEL, base_url="http://x", pattern="("), "pattern"),
        (lambda: Llm(**MODEL, base_url="http://x", pattern="x"), "pattern"),
        (lambda: Llm(**MODEL, base_url="http://x", pattern="(x)", field="y"), "field"),
        (lambda: Llm(**MODEL, base_url="http://x", sampling=[]), "sampling"),  # type: ignore[arg-type]
    ],
)
def test_an_option_that_cannot_be_used_is_named(made: Any, path: str) -> None:
    """Before anything starts, at its own path."""  # P35
    with pytest.raises(ConfigError, match=rf"^{re.escape(path)}: "):
        made()
