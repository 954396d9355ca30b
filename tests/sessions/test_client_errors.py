"""Refusals as real clients see them: their own exceptions, our words; asked again by themselves where that helps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from rollout_svc.errors import SampleFailure
from tests.support.caller import Step
from tests.support.spoken import Site, spoken, words

Ask = Callable[..., Awaitable[Any]]
USER: Any = {"role": "user", "content": "hi"}


async def ask_openai(site: Site, key: str = "", retries: int = 2, **more: Any) -> Any:
    """Ask for a turn with the settings that a client has by itself, two retries among them."""
    async with openai.AsyncOpenAI(base_url=site.openai_url, api_key=key or site.key, max_retries=retries) as client:
        return await client.chat.completions.create(**{"model": "policy", "messages": [USER], **more})


async def ask_anthropic(site: Site, key: str = "", retries: int = 2, **more: Any) -> Any:
    """Likewise."""
    async with anthropic.AsyncAnthropic(
        base_url=site.anthropic_url, api_key=key or site.key, max_retries=retries
    ) as client:
        return await client.messages.create(**{"model": "policy", "max_tokens": 9, "messages": [USER], **more})


BOTH = pytest.mark.parametrize(("ask", "sdk"), [(ask_openai, openai), (ask_anthropic, anthropic)])


@BOTH
async def test_a_pause_is_waited_for_by_the_client_itself(ask: Ask, sdk: Any) -> None:
    """P15: 503 + Retry-After; after the pause it has its answer, and nothing of the refusal is in the sample."""
    async with spoken(words("yo")) as site:
        site.table.withdraw()
        site.after_refusal = lambda: site.table.gate.open(["train"])
        assert await ask(site)
        assert site.statuses == [503, 200]
        assert [turn.content for turn in site.recorded()] == ["yo"]


@BOTH
async def test_a_pause_that_the_client_does_not_wait_for(ask: Ask, sdk: Any) -> None:
    """P15: the refusal is the client's exception, in our words."""
    async with spoken() as site:
        site.table.withdraw()
        with pytest.raises(sdk.InternalServerError, match="the stage is paused"):
            await ask(site, retries=0)
        assert site.statuses == [503]


@pytest.mark.parametrize(
    ("ask", "sdk", "fields", "match"),
    [
        (ask_openai, openai, {"n": 2}, "n: one answer a turn"),
        (ask_openai, openai, {"response_format": {"type": "json_object"}}, r"response_format\.type: a format"),
        (ask_anthropic, anthropic, {"tool_choice": {"type": "any"}}, r"tool_choice\.type: a call cannot be forced"),
        (ask_anthropic, anthropic, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, r"thinking\.type"),
    ],
)
async def test_what_cannot_be_promised(ask: Ask, sdk: Any, fields: dict[str, Any], match: str) -> None:
    """P35: a BadRequestError in our words, once; no token is made."""
    async with spoken() as site:
        with pytest.raises(sdk.BadRequestError, match=match) as refused:
            await ask(site, **fields)
        assert site.statuses == [400]
        if sdk is openai:
            assert refused.value.param == next(iter(fields)) + (".type" if "response_format" in fields else "")


@BOTH
async def test_another_key(ask: Ask, sdk: Any) -> None:
    """P34: a key of another session opens nothing."""
    async with spoken() as site:
        with pytest.raises(sdk.AuthenticationError, match="another key"):
            await ask(site, key="sk-other")
        assert site.statuses == [401]


@BOTH
async def test_a_session_that_is_over(ask: Ask, sdk: Any) -> None:
    """P15: 410, and the client does not ask again."""
    async with spoken() as site:
        site.table.hand_back()
        with pytest.raises(sdk.APIStatusError, match="this session is over") as refused:
            await ask(site)
        assert (refused.value.status_code, site.statuses) == (410, [410])


@BOTH
@pytest.mark.parametrize(
    ("step", "status", "match"),
    [
        (SampleFailure("rejected_by_engine", "HTTP 400: too long"), 400, "too long"),
        (SampleFailure("invalid_response", "no ids"), 422, "no ids"),
        (KeyError("x"), 500, "a bug"),
    ],
)
async def test_a_turn_that_failed(ask: Ask, sdk: Any, step: Step, status: int, match: str) -> None:
    """P4: told once, as what it is; the client does not make the engine fail again."""
    async with spoken(step) as site:
        with pytest.raises(sdk.APIStatusError, match=match) as refused:
            await ask(site)
        assert (refused.value.status_code, site.statuses) == (status, [status])
        assert site.recorded() == []


async def test_messages_that_do_not_fit() -> None:
    """P4: the clients' own marks of it; asked once."""
    words = "HTTP 400: The input (30 tokens) is longer than the model's context length (20 tokens)."
    for ask, sdk in ((ask_openai, openai), (ask_anthropic, anthropic)):
        async with spoken(SampleFailure("rejected_by_engine", words)) as site:
            with pytest.raises(sdk.BadRequestError) as refused:
                await ask(site)
            assert site.statuses == [400]
            if sdk is openai:
                assert refused.value.code == "context_length_exceeded"
            else:
                assert "prompt is too long" in refused.value.message
