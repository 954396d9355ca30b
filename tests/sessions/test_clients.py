"""Real clients, unmodified: what they saw is what is trained on, turn by turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from tests.support.spoken import Site, Turn, calling, spoken, words

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
OPENAI_TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "add", "input_schema": ADD}]
THINK = "Let me see: ½ + ½…\n"
SCRIPT = (words(THINK + calling("add", a=2, b=3), 4), words(calling("add", a=5, b=1.0) * 2, 4), words("It is 6. ✓", 5))
SEEN = [
    Turn(THINK.strip(), (("add", {"a": 2, "b": 3}),)),
    Turn("", (("add", {"a": 5, "b": 1.0}),) * 2),
    Turn("It is 6. ✓"),
]
WROTE = (
    "<f>add;<u>2+3+1?;<a>Let me see: ½ + ½…\n"
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>;<t>5;<a>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 1.0}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 1.0}}</tool_call>;<t>6;<t>6;<a>It is 6. ✓'
)


def check(site: Site, seen: list[Turn]) -> None:
    """One training segment: what was seen, the messages between as they were sent, the versions that made it."""
    assert seen == SEEN
    assert site.recorded() == SEEN
    assert site.text() == WROTE
    assert site.table.sample.earlier == []
    assert site.versions() == [4, 4, 5]


def from_openai(message: Any) -> Turn:
    """What a client of OpenAI's sees."""
    calls = message.tool_calls or []
    return Turn(message.content or "", tuple((one.function.name, json.loads(one.function.arguments)) for one in calls))


def from_anthropic(message: anthropic.types.Message) -> Turn:
    """What a client of Anthropic's sees."""
    said = "".join(block.text for block in message.content if block.type == "text")
    return Turn(said, tuple((block.name, block.input) for block in message.content if block.type == "tool_use"))


def openai_results(message: Any) -> list[Any]:
    """The answers of the tool to a message's calls."""
    found = [(one.id, json.loads(one.function.arguments)) for one in message.tool_calls or []]
    return [{"role": "tool", "tool_call_id": name, "content": f"{sum(given.values()):g}"} for name, given in found]


def anthropic_results(message: anthropic.types.Message) -> list[Any]:
    """The answers of the tool to a message's calls."""
    calls: list[tuple[str, Any]] = [(block.id, block.input) for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": name, "content": f"{sum(given.values()):g}"} for name, given in calls
    ]


def speak_openai(url: str, key: str) -> list[Turn]:
    """A tool loop of the synchronous client."""
    messages: list[Any] = [{"role": "user", "content": "2+3+1?"}]
    seen: list[Turn] = []
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        while len(seen) < len(SEEN):
            answer = client.chat.completions.create(model="policy", messages=messages, tools=OPENAI_TOOLS)
            message = answer.choices[0].message
            seen.append(from_openai(message))
            messages += [message, *openai_results(message)]
    return seen


async def test_openai_in_a_thread_of_its_own() -> None:
    """P6: a tool loop of the synchronous client."""
    async with spoken(*SCRIPT) as site:
        check(site, await asyncio.to_thread(speak_openai, site.openai_url, site.key))


async def test_openai_streaming() -> None:
    """P6: the same of the asynchronous one, streamed; the usage is told where it is asked for."""
    messages: list[Any] = [{"role": "user", "content": "2+3+1?"}]
    seen: list[Turn] = []
    asked: dict[str, Any] = {"model": "policy", "tools": OPENAI_TOOLS, "stream_options": {"include_usage": True}}
    async with spoken(*SCRIPT) as site, openai.AsyncOpenAI(base_url=site.openai_url, api_key=site.key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        while len(seen) < len(SEEN):
            async with client.chat.completions.stream(messages=messages, **asked) as stream:
                final = await stream.get_final_completion()
            message = final.choices[0].message
            seen.append(from_openai(message))
            assert final.usage is not None
            assert final.usage.total_tokens == len(site.table.sample.prefix_ids())
            messages += [message.model_dump(), *openai_results(message)]
        check(site, seen)


def speak_anthropic(url: str, key: str) -> list[Turn]:
    """A tool loop of the synchronous client."""
    messages: list[Any] = [{"role": "user", "content": "2+3+1?"}]
    seen: list[Turn] = []
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        while len(seen) < len(SEEN):
            answer = client.messages.create(
                model="policy", max_tokens=500, messages=messages, tools=ANTHROPIC_TOOLS, system=[]
            )
            seen.append(from_anthropic(answer))
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [{"role": "user", "content": anthropic_results(answer)}]
    return seen


async def test_anthropic_in_a_thread_of_its_own() -> None:
    """P6: a tool loop of the synchronous client, its blocks sent back as they came."""
    async with spoken(*SCRIPT) as site:
        check(site, await asyncio.to_thread(speak_anthropic, site.anthropic_url, site.key))


async def test_anthropic_streaming() -> None:
    """P6: the same of the asynchronous one, streamed."""
    messages: list[Any] = [{"role": "user", "content": "2+3+1?"}]
    seen: list[Turn] = []
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 500, "tools": ANTHROPIC_TOOLS}
    async with (
        spoken(*SCRIPT) as site,
        anthropic.AsyncAnthropic(base_url=site.anthropic_url, api_key=site.key) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["policy"]
        while len(seen) < len(SEEN):
            async with client.messages.stream(messages=messages, **asked) as stream:
                answer = await stream.get_final_message()
            seen.append(from_anthropic(answer))
            whole = answer.usage.input_tokens + answer.usage.output_tokens
            assert whole == len(site.table.sample.prefix_ids())
            assert answer.stop_reason == ("tool_use" if seen[-1].calls else "end_turn")
            messages += [{"role": "assistant", "content": [block.model_dump() for block in answer.content]}]
            messages += [{"role": "user", "content": anthropic_results(answer)}]
        check(site, seen)


@function_tool
def add(a: float, b: float) -> str:
    """Add."""
    return f"{a + b:g}"


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents(streamed: bool) -> None:
    """P6: its own loop calls the tool; what it made of our answers on the way is no rewriting."""
    async with spoken(*SCRIPT) as site, openai.AsyncOpenAI(base_url=site.openai_url, api_key=site.key) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="adder", model=model, tools=[add])
        settings = RunConfig(tracing_disabled=True)
        if streamed:
            running = Runner.run_streamed(agent, "2+3+1?", run_config=settings)
            async for _ in running.stream_events():
                pass
            said = running.final_output
        else:
            said = (await Runner.run(agent, "2+3+1?", run_config=settings)).final_output
        assert said == SEEN[-1].content
        check(site, SEEN)
