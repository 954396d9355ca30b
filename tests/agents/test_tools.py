"""`tools`: calls in the model's text are made, side by side, and whatever comes of them is told to the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_agents.tools import Tools
from rollout_svc.agent import AgentContext
from rollout_svc.chat_template import ChatTemplate
from rollout_svc.errors import ConfigError, Interrupted
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.tokens import ByteTokenizer
from tests.support.caller import Step, Table, answer
from tests.support.groups import make_prompt
from tests.support.virtual import soon, virtual

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERE = "tests.support.tools:"
WEATHER, SLEEPS, RAISES = f"{HERE}weather", f"{HERE}sleeps", f"{HERE}raises"
HELLO = [{"role": "user", "content": "hello"}]


def call(name: str, arguments: str = "{}") -> str:
    """What a model writes to call a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def says(*calls: str) -> Step:
    """A turn of the model."""
    return answer(list("".join(calls).encode()))


def set_table(*script: Step, content: Any = HELLO) -> Table:
    """Set a table where prompts are messages."""
    table = Table(*script, max_tokens=500, on_pause="park", experts=True)
    table.tokenizer = ByteTokenizer(ChatTemplate(TEMPLATE, {}).render)
    table.prompt = make_prompt(content=content)
    return table


async def go(table: Table, tools: list[Any] | None = None, **options: Any) -> None:
    """Run the loop to its end, clean-up included."""
    context: AgentContext = table.context()
    try:
        await Tools(tools=tools or [WEATHER, SLEEPS, RAISES], **options).run(table.sample, context)
    finally:
        await context.work.close()
    await soon()
    assert not table.tasks.live  # nothing outlives its sample, a tool that took too long included
    assert table.sample.segments[-1].by_model


async def run(*script: Step, content: Any = HELLO, **options: Any) -> Table:
    """Run the loop over this script."""
    table = set_table(*script, content=content)
    await go(table, **options)
    return table


def told(table: Table, turn: int = 1) -> str:
    """What the model was told since its first turn, before another one."""
    first = table.asks()[0][0]
    return bytes(table.asks()[turn][0][len(first) :]).decode()


@virtual
async def test_a_call_is_made_and_its_answer_told() -> None:
    """P6: the prompt tells of the tools, the answer is appended with mask 0, and an answer without a call ends it."""
    said = call("weather", '{"city": "Oslo"}')
    table = await run(says(said), says("20 degrees"))
    assert bytes(table.asks()[0][0]).decode() == "[weather sleeps raises ]<user>hello<end><assistant>"
    answered = '<end><tool>{"city":"Oslo","degrees":20,"unit":"C"}<end><assistant>'
    assert told(table) == said + answered
    assert sum(table.sample.loss_mask) == len(said) + len("20 degrees")
    assert table.sample.meta == {"logprobs_mode": "unknown", "turns": 2, "ended": "answered", "tool_calls": 1}
    assert table.sample.earlier == []


@virtual
async def test_a_cut_first_turn_goes_on_in_another_run() -> None:
    """P6 P10: handed out again, the loop goes on from the tokens it has, after the same prompt with its tools."""
    table = set_table(answer([65], "abort", late=True), answer([66]))
    table.on_pause = "abort"
    with pytest.raises(Interrupted):
        await go(table)
    table.hand_back()
    await go(table)
    first, second = (asked for asked, _ in table.asks())
    assert second == [*first, 65]
    assert (table.sample.response_ids, table.sample.earlier) == ([65, 66], [])


@virtual
async def test_calls_of_one_turn_run_side_by_side() -> None:
    """They take as long as the longest, and are told in the order of the calls."""
    calls = [call("sleeps", f'{{"seconds": {seconds}}}') for seconds in (5, 1, 3)]
    table = await run(says(*calls), says("done"))
    assert asyncio.get_running_loop().time() == 5
    assert [word for word in told(table).split("<end>") if "slept" in word] == [
        "<tool>slept 5",
        "<tool>slept 1",
        "<tool>slept 3",
    ]


@pytest.mark.parametrize(
    ("said", "words", "problem"),
    [
        (call("fly"), "no tool 'fly'; there are: weather, sleeps, raises", "unknown_tool"),
        (call("weather"), "weather: arguments: missing: city", "bad_arguments"),
        (call("weather", '{"city": "x", "day": 1}'), "unknown: day; there are: city, unit", "bad_arguments"),
        (call("weather", '{"city": "x", "unit": "K"}'), "unit: Input should be 'C' or 'F'", "bad_arguments"),
        (call("sleeps", '{"seconds": "long"}'), "seconds: Input should be a valid number", "bad_arguments"),
        (call("sleeps", '{"seconds": 99}'), "sleeps: no answer in 10 s", "timeout"),
        (call("raises", '{"text": "as (told)"}'), "raises: ValueError: as (told)<", "raised"),
        (call("raises", '{"half": true}'), "raises: ValueError: half ?<", "raised"),
        ("<tool_call>{]</tool_call>", "cannot be read: no JSON", "unreadable"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(said: str, words: str, problem: str) -> None:
    """The model reads what was wrong, and no path of this machine; the sample's meta counts it by its kind."""

    @virtual
    async def check() -> None:
        table = await run(says(said), says("sorry"), max_tool_s=10)
        assert words in told(table)
        assert "tools.py" not in told(table)
        meta = table.sample.meta
        assert (meta["tool_calls"], meta["tool_problems"], meta["ended"]) == (1, {problem: 1}, "answered")
        assert ("tools.py:" in str(meta.get("tool_errors"))) == (problem == "raised")

    check()


@virtual
async def test_half_a_character_is_told_as_a_mark() -> None:
    """An answer that no tokenizer takes does not end its sample."""
    table = set_table(says(call("halves")), says("done"))
    await go(table, tools=[f"{HERE}halves"])
    assert "<tool>a half: ?<" in told(table)
    assert table.sample.meta["ended"] == "answered"


@virtual
async def test_a_turn_has_so_many_calls() -> None:
    """Those beyond are not made, and the model is told so."""
    table = await run(says(*[call("sleeps", '{"seconds": 1}')] * 4), says("done"), max_calls=3)
    assert told(table).count("slept 1") == 3
    assert table.sample.meta["tool_problems"] == {"too_many": 1}


@virtual
async def test_calls_of_the_last_turn_are_not_made() -> None:
    """Nobody would read their answers; nothing stands after the model's last turn."""
    said = call("sleeps", '{"seconds": 1}')
    table = await run(says(said), says(said), max_turns=2)
    assert (table.sample.meta["ended"], table.sample.meta["tool_calls"]) == ("max_turns", 1)
    table = await run(answer(list(said.encode()), "length"))
    assert (table.sample.meta["ended"], table.sample.meta["tool_calls"]) == ("length", 0)


@pytest.mark.parametrize("content", ["as text", None])
def test_a_prompt_that_is_no_messages_stands_as_it_is(content: str | None) -> None:
    """Text and ids tell of tools themselves, or do not; calls are read and answered all the same."""

    @virtual
    async def check() -> None:
        table = await run(says(call("sleeps", '{"seconds": 1}')), says("done"), content=content)
        assert table.asks()[0][0] == [1, 2, 3]
        assert "slept 1" in told(table)

    check()


@virtual
async def test_a_tool_may_be_an_object_with_options_and_a_schema() -> None:
    """A class is made with its options; name, description and parameters may be given."""
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    tool = {"path": f"{HERE}Lookup", "options": {"words": {"a": "b"}}, "name": "find", "parameters": schema}
    table = await run(
        says(call("find", '{"word": "a"}'), call("find", '{"word": 1}'), call("find", '{"word": "z"}')),
        says("ok"),
        tools=[tool],
    )
    assert "<tool>b<end><tool>error: find: arguments: word: expected string<end>" in told(table)
    assert "find: KeyError: 'z'" in told(table)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": []}, "a.tools: expected a list of at least one"),
        ({"tools": WEATHER}, "a.tools: expected a list"),
        ({"tools": [WEATHER, 3]}, "a.tools.1: expected module:attr"),
        ({"tools": ["tests.support.tools:nothing"]}, "a.tools.0: cannot import"),
        ({"tools": [f"{HERE}HERE"]}, "a.tools.0: cannot import"),
        ({"tools": [f"{HERE}__all__"]}, "a.tools.0: .* cannot be called"),
        ({"tools": [f"{HERE}unclear"]}, "a.tools.0.parameters: unclear: TypeError: places: a model names"),
        ({"tools": [{"path": WEATHER, "timeout_s": 31}]}, "a.tools.0.timeout_s: 31 is more than max_tool_s = 30"),
        ({"tools": [{"path": WEATHER, "timeout_s": 0}]}, "a.tools.0.timeout_s: expected a number above 0"),
        ({"tools": [{"path": WEATHER, "timeout": 1}]}, "a.tools.0.timeout: no such key"),
        ({"tools": [{"path": WEATHER, "parameters": {"type": "array"}}]}, "a.tools.0.parameters: .*type object"),
        ({"tools": [{"path": f"{HERE}Lookup", "options": {"word": 1}}]}, "a.tools.0.word: .*no such option"),
        ({"tools": [WEATHER, WEATHER]}, "a.tools: two have the same name"),
        ({"tools": [WEATHER], "max_tool_s": 0}, "a.max_tool_s: expected a number above 0"),
        ({"tools": [WEATHER], "tool_format": "xml"}, "a.tool_format: 'xml' is none of"),
    ],
)
def test_a_wrong_option_is_told_at_its_path(options: dict[str, Any], words: str) -> None:
    """P35: before anything starts, with the dotted path."""
    with pytest.raises(ConfigError, match=words):
        construct(PluginSpec("rollout_agents.tools:Tools", options), "a")
