"""Real clients over the real service, while it is paused and its weights change: they see nothing of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from rollout_svc.rpc import session_calls
from tests.support.fake_sglang import Status
from tests.support.session_site import Site, ids, session_site

USER: Any = {"role": "user", "content": "hi"}
Ask = Callable[[str, str], Awaitable[str]]


async def ask_openai(url: str, key: str) -> str:
    """A turn of OpenAI's client, streamed."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def ask_anthropic(url: str, key: str) -> str:
    """A turn of Anthropic's client, streamed."""
    async with (
        anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=64, messages=[USER]) as stream,
    ):
        return await stream.get_final_text()


async def ask_agents(url: str, key: str) -> str:
    """A run of openai-agents."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        agent = Agent(name="a", model=OpenAIChatCompletionsModel(model="m", openai_client=client))
        found = await Runner.run(agent, "hi", run_config=RunConfig(tracing_disabled=True))
        return str(found.final_output)


async def update(site: Site) -> None:
    """Pause while the engine works on a turn, give it other weights, and go on."""
    site.engine.lose_aborts = True  # it has said something when it ends the turn
    pausing = site.stage.start(site.stage.pause())
    await site.engine.wait_hits("/abort_request", 1)
    site.engine.release(tokens=ids("It "), finish="abort")
    assert (await pausing).clean
    site.engine.set_version("1")
    await site.stage.service.update_weights(1, {"kind": "external"})
    await site.stage.resume()


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic, ask_agents])
async def test_a_client_does_not_see_an_update_of_weights(ask: Ask) -> None:
    """P7, P15: a turn that a pause cuts is continued before it is answered; each token knows its version."""
    async with session_site() as site:
        client = site.client()
        told = await client.take()
        going = site.stage.start(ask(told["base_url"], told["api_key"]))
        await site.engine.wait_running(1)
        await update(site)
        await site.engine.wait_running(1)
        site.engine.release(tokens=ids("is 6"))
        assert await going == "It is 6"
        assert (await client.end())[0] == 200
        [group] = (await site.stage.take(step=1))["groups"]
        [sample] = group["samples"]
        assert (sample["response"], sample["loss_mask"]) == ("It is 6", [1] * 7)
        spans = [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]
        assert spans == [(0, 0, 3), (1, 3, 7)]


async def begin_openai(url: str, key: str) -> Any:
    """A stream of OpenAI's client, begun."""
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    return await client.chat.completions.create(model="m", messages=[USER], stream=True)


async def begin_anthropic(url: str, key: str) -> Any:
    """A stream of Anthropic's client, begun."""
    client = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
    return await client.messages.create(model="m", max_tokens=64, messages=[USER], stream=True)


@pytest.mark.parametrize(("begin", "sdk"), [(begin_openai, openai), (begin_anthropic, anthropic)])
async def test_a_turn_that_fails_in_its_stream(begin: Ask, sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: the status was told, so the stream says it: the client's own exception, in our words."""
    monkeypatch.setattr(session_calls, "_WARM_S", 0.02)
    async with session_site() as site:
        told = await site.client().take()
        stream: Any = await begin(told["base_url"], told["api_key"])
        site.engine.release(fate=Status(400, b"too long"))
        with pytest.raises(sdk.APIError, match="too long"):
            async for _ in stream:
                pass
        await stream._client.close()
