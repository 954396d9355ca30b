"""`multi_turn`: turns appended by their ids, an environment for each sample, and an end that has a reason."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout_agents.multi_turn import MultiTurn
from rollout_svc.agent import AgentContext
from rollout_svc.chat_template import ChatTemplate
from rollout_svc.errors import ConfigError, Interrupted, SampleFailure, StaleAttempt
from rollout_svc.plugins import PluginSpec, construct
from rollout_svc.sample import SampleStatus
from rollout_svc.tokens import ByteTokenizer
from tests.support.caller import Step, Table, answer
from tests.support.environments import Scripted
from tests.support.groups import make_prompt
from tests.support.virtual import soon, virtual

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
SCRIPTED = "tests.support.environments:Scripted"
HELLO = [{"role": "user", "content": "hello"}]


def user(text: str, **more: Any) -> dict[str, Any]:
    """A step's answer."""
    return {"messages": [{"role": "user", "content": text}], **more}


def ids(text: str) -> list[int]:
    """What the model says, or is told."""
    return list(text.encode())


def set_table(*script: Step, content: Any = HELLO, **options: Any) -> Table:
    """Set a table where prompts are messages."""
    table = Table(*script, max_tokens=20, on_pause="park", **options)
    table.tokenizer = ByteTokenizer(ChatTemplate(CHATML, {}).render)
    table.prompt = make_prompt(content=content)
    return table


async def run(table: Table, **options: Any) -> AgentContext:
    """Run the loop to its end, clean-up included."""
    context = table.context()
    try:
        await MultiTurn(environment=SCRIPTED, **options).run(table.sample, context)
    finally:
        await context.work.close()
    return context


def ended(table: Table) -> tuple[Any, Any, Any]:
    """What the sample's meta says of its end."""
    meta = table.sample.meta
    return meta["turns"], meta["ended"], meta.get("reported_reward")


@virtual
async def test_turns_are_appended_and_masked() -> None:
    """P6: each turn is asked for after the exact ids before it; what the environment says has mask 0."""
    Scripted.plan(user("more", reward=0.25), {"done": True, "reward": np.float32(0.5)})
    table = set_table(answer(ids("one")), answer(ids("two")))
    await run(table)
    told = ids("<end><user>more<end><assistant>")
    assert [asked for asked, _ in table.asks()] == [[1, 2, 3], [1, 2, 3, *ids("one"), *told]]
    assert table.sample.response_ids == [*ids("one"), *told, *ids("two")]
    assert table.sample.loss_mask == [1] * 3 + [0] * len(told) + [1] * 3
    assert ended(table) == (2, "done", 0.75)
    [made] = Scripted.made
    assert [said["content"] for said in made.seen] == ["one", "two"]
    assert (made.closed, made.view.prompt) == (1, HELLO)


@pytest.mark.parametrize(
    ("script", "steps", "end"),
    [
        ([answer([65]), answer([66])], [user("a"), user("b")], (2, "max_turns", None)),
        ([answer([65], "length")], [user("a", reward=1)], (1, "length", 1.0)),
        ([answer([65])], [None], (1, "done", None)),
        ([answer([65])], [user("never said", done=True)], (1, "done", None)),
    ],
)
def test_the_last_turn_is_the_end_of_the_sample(script: list[Step], steps: list[Any], end: tuple[Any, ...]) -> None:
    """However it ends, `meta` says so, its environment has seen every turn, and nothing stands after the last."""

    @virtual
    async def check() -> None:
        Scripted.plan(*steps)
        table = set_table(*script)
        await run(table, max_turns=2)
        assert ended(table) == end
        assert table.sample.segments[-1].by_model
        assert len(Scripted.made[0].seen) == len(steps)

    check()


@virtual
async def test_a_full_context_ends_the_conversation_with_the_turn_before() -> None:
    """P6: what was said to the model since is dropped; the first turn's refusal is the sample's failure."""
    full = SampleFailure(
        "rejected_by_engine", "The input (30 tokens) is longer than the model's context length (20 tokens)."
    )
    Scripted.plan(user("a", reward=1.0), user("b"))
    table = set_table(answer([65]), full)
    await run(table)
    assert ended(table) == (1, "context_full", 1.0)
    assert (table.sample.response_ids, table.sample.finish_reason) == ([65], "stop")
    assert table.sample.engine_finish_reason == "stop"
    with pytest.raises(SampleFailure, match="longer than"):
        await run(set_table(full))
    Scripted.plan(user("a"))
    with pytest.raises(SampleFailure, match="temperature"):
        await run(set_table(answer([65]), SampleFailure("rejected_by_engine", "temperature: no")))


@virtual
async def test_an_environment_may_begin_the_conversation() -> None:
    """Its messages stand in place of the prompt's; nothing was said before, so there is no earlier segment."""
    Scripted.plan(None, beginning=[{"role": "user", "content": "play"}])
    table = set_table(answer([65]), experts=True)
    context = await run(table)
    assert table.asks()[0][0] == table.sample.prompt_ids == ids("<user>play<end><assistant>")
    assert (table.sample.earlier, context.experts) == ([], True)


@pytest.mark.parametrize("content", [HELLO, "hello"])
def test_another_run_may_begin_with_the_prompt_again(content: Any) -> None:
    """P6: what an earlier run began with, and made of it, is gone where its environment says nothing this time."""

    @virtual
    async def check() -> None:
        table = set_table(answer([65], "abort"), answer([66]))
        table.prompt = make_prompt(content=content)
        Scripted.plan(None, beginning=[{"role": "user", "content": "play"}])
        table.on_pause = "abort"
        with pytest.raises(Interrupted):
            await run(table)
        table.sample.transition(table.sample.attempt, SampleStatus.ABORTED, resume_at="generate")
        Scripted.plan(None)
        await run(table)
        assert (table.asks()[-1][0], table.sample.prompt_ids, table.sample.response_ids) == ([1, 2, 3], [1, 2, 3], [66])
        assert table.sample.earlier == []

    check()


@virtual
async def test_an_environment_is_told_of_calls() -> None:
    """With `tool_format` what it is told has the calls, in OpenAI's form."""
    Scripted.plan(None)
    await run(set_table(answer(ids('<tool_call>{"name": "go", "arguments": {}}</tool_call>'))), tool_format="hermes")
    [[said]] = [made.seen for made in Scripted.made]
    assert said["tool_calls"][0]["function"] == {"name": "go", "arguments": "{}"}


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            ValueError("broken"),
            r"environment_error: .*Scripted.step: ValueError: broken \(.*environments.py:\d+ in ",
        ),
        (99.0, "environment_timeout: .*not done in 2 s"),
        ("nonsense", "expected a mapping"),
        ({"messages": ["text"]}, "expected a list of mappings with a role"),
        (user("x", reward="much"), "a reward is a finite number"),
        (user("x", reward=float("nan")), "a reward is a finite number"),
        ({"messages": []}, "nothing to answer"),
        (user("x", finished=True), "unknown keys"),
    ],
)
def test_what_an_environment_does_wrong_is_a_typed_failure(step: Any, told: str) -> None:
    """The sample fails with the reason, and where somebody's code raised; it is closed all the same."""

    @virtual
    async def check() -> None:
        Scripted.plan(step)
        with pytest.raises(SampleFailure, match=told):
            await run(set_table(answer([65])), max_step_s=2.0)
        assert Scripted.made[0].closed == 1

    check()


@virtual
async def test_a_pause_in_a_step_cancels_nothing() -> None:
    """P10 P15: the step goes on while the stage is paused; the next turn waits for the gate, and is then made."""
    going = asyncio.Event()

    async def slow() -> Any:
        await going.wait()
        return user("on")

    Scripted.plan(slow, None)
    table = set_table(answer([65]), Interrupted("closed"), answer([66]))
    running = asyncio.create_task(run(table))
    await soon(20)
    table.withdraw()
    going.set()
    await asyncio.sleep(100)
    assert (table.parked, running.done(), table.sample.status) == (1, False, SampleStatus.GENERATING)
    table.gate.open(["train"])
    await running
    assert ended(table) == (2, "done", None)


@virtual
async def test_a_step_of_a_sample_that_was_taken_back_writes_nothing() -> None:
    """P3 P14: its step is cancelled with its task; one that swallows that delays nobody, and its reward is no one's."""
    left = asyncio.Event()

    async def deaf() -> Any:
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
        left.set()
        return user("late", reward=1.0)

    Scripted.plan(deaf)
    table = set_table(answer([65]))
    running = asyncio.create_task(run(table))
    await asyncio.sleep(10)
    table.hand_back()
    running.cancel()
    await asyncio.wait({running})
    assert (running.cancelled(), left.is_set(), Scripted.made[0].closed) == (True, False, 1)
    await left.wait()
    await soon()
    assert not table.tasks.live
    assert "reported_reward" not in table.sample.meta


@virtual
async def test_a_revoked_loop_reports_nothing() -> None:
    """P3: taken back during its last step, the loop's note is refused like any other write."""

    async def step() -> Any:
        table.hand_back()
        return {"done": True, "reward": 1.0}

    Scripted.plan(step)
    table = set_table(answer([65]))
    with pytest.raises(StaleAttempt):
        await run(table)
    assert "reported_reward" not in table.sample.meta


@virtual
async def test_a_run_begins_with_clean_notes() -> None:
    """What an earlier run of the loop reported is gone when it begins again."""
    Scripted.plan(ValueError("now"))
    table = set_table(answer([65]))
    table.sample.meta = {"reported_reward": 1.0, "ended": "done", "mine": 1}
    with pytest.raises(SampleFailure):
        await run(table)
    assert table.sample.meta == {"mine": 1, "logprobs_mode": "unknown"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"environment": "tests.support.environments:Nobody"}, "a.environment: cannot import"),
        ({"environment": "tests.support.environments:__all__"}, "a.environment: .* is no class"),
        ({"environment": "tests.support.caller:Table"}, "a.environment: .* has no method reset and no step"),
        ({"environment_options": {"speed": 1}}, "a.environment_options.speed: .* no such option"),
        ({"max_turns": 0}, "a.max_turns: expected a number above 0"),
        ({"max_step_s": -1}, "a.max_step_s: expected a number above 0"),
        ({"tool_format": "xml"}, "a.tool_format: 'xml' is none of hermes, json"),
        ({"turns": 3}, "a.turns: .* no such option"),
    ],
)
def test_a_wrong_option_is_told_at_its_path(options: dict[str, Any], told: str) -> None:
    """P35: before anything starts, with the dotted path."""
    spec = PluginSpec("rollout_agents.multi_turn:MultiTurn", {"environment": SCRIPTED} | options)
    with pytest.raises(ConfigError, match=told):
        construct(spec, "a")
