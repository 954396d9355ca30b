"""Conversations of several turns through a whole service: parked wherever a pause meets them, and whole in the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.pause.report import PauseReport
from tests.service.test_experts import WANTED, check, one
from tests.support.bell import WAIT_S
from tests.support.environments import Gated
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.lifted import LiftingTransport
from tests.support.processes import lives, until
from tests.support.routing import TINY
from tests.support.stage import Stage, stage

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
_FULL = 20  # tokens: room for the first prompt, and not for the second
SECTIONS: dict[str, Any] = {
    "tokenizer": {"path": "bytes", "chat_template": TEMPLATE},
    "judger": {"path": "rollout_judgers.reported:Reported"},
    "agent": {"path": "rollout_agents.multi_turn:MultiTurn", "environment": "tests.support.environments:Gated"},
    "sampling": {"max_tokens": 200},
}


def prompts(*names: str) -> list[dict[str, Any]]:
    """Prompts that say their names."""
    return [{"id": name, "messages": [{"role": "user", "content": name}]} for name in names]


def call_of(engine: FakeSGLang, name: str) -> Call:
    """The live call of a prompt."""
    [found] = [call for call in engine.live.values() if f"<user>{name}".encode() in bytes(call.prompt_ids)]
    return found


async def everywhere(engine: FakeSGLang, made: Stage) -> None:
    """Have four samples: in the first turn, in the environment twice, in the second turn."""
    Gated.prepare(made.bell)
    await made.push(prompts("one", "two", "three", "four"))
    await engine.wait_running(4)
    for name in ("two", "three", "four"):
        engine.release(call_of(engine, name), tokens=[65])
    await made.until(lambda: Gated.waiting == {"two", "three", "four"})
    Gated.let("four")
    await engine.wait_requests(5)


async def finish(engine: FakeSGLang, made: Stage) -> list[dict[str, Any]]:
    """Let everything go on to its end."""
    engine.answer = lambda _: Reply(tokens=[67])
    engine.release(tokens=[67])
    Gated.let("one", "two", "three", "four")
    batch = await made.take(groups=4)
    return [group["samples"][0] for group in batch["groups"]]


async def test_a_pause_meets_conversations_anywhere() -> None:
    """P9 P10 P15: clean, all parked, the books balanced; then each goes on where it was, over an update of weights."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, **SECTIONS) as made:
        await everywhere(engine, made)
        report: PauseReport = await made.pause()
        assert (report.clean, len(report.parked), report.ledger["samples"]["in_flight"]) == (True, 4, 4)
        Gated.let("three")  # its step ends while the stage is paused: its turn waits for the gate
        await made.until(lambda: Gated.waiting == {"two"})
        await made.service.update_weights(1, {"kind": "disk", "path": "/w"})
        assert not engine.live
        await made.resume()
        samples = await finish(engine, made)
        for sample in samples:
            assert (sample["status"], sample["reward"], sample["meta"]["turns"]) == ("COMPLETED", 1.0, 2)
            assert [span["version"] for span in sample["weight_versions"]][:1] == [0]
            assert {span["version"] for span in sample["weight_versions"]} == {0, 1}
            said = [token for token, own in zip(sample["response_ids"], sample["loss_mask"], strict=True) if own]
            assert said in ([65, 67], [101, 102, 103, 67, 67], [65, 101, 102, 103, 67])
            told = bytes(t for t, own in zip(sample["response_ids"], sample["loss_mask"], strict=True) if not own)
            assert told == b"<user>on>"
        assert sorted(Gated.closed) == ["four", "one", "three", "two"]
        assert not made.parts.tally.redone


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_other_modes_cancel_no_conversation(mode: str) -> None:
    """P9 P10: turns finish, or stand still; environments go on; nothing begins before the resume."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, **SECTIONS) as made:
        await everywhere(engine, made)
        pausing = made.start(made.pause(2.0, mode=mode))
        await made.until(lambda: not made.parts.gate.is_open("train"))
        Gated.let("three")
        await made.until(lambda: Gated.waiting == {"two"})
        if mode == "wait":
            engine.release(tokens=[65])  # the first turn of one, whose step begins; the last turn of another
            await made.until(lambda: Gated.waiting == {"one", "two"})
        report = await pausing
        assert report.clean
        assert len(engine.requests) == 5
        await made.resume()
        for sample in await finish(engine, made):
            assert (sample["status"], sample["reward"], sample["meta"]["turns"]) == ("COMPLETED", 1.0, 2)
        assert len(engine.requests) == 8
        assert not made.parts.tally.redone


async def test_turns_under_one_version_are_not_mixed() -> None:
    """P7: what was said in between cuts the spans of a sample; the figure counts versions, not spans."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, **SECTIONS) as made:
        Gated.prepare(made.bell)
        Gated.let("one")
        engine.answer = lambda _: Reply(tokens=[67])
        await made.push(prompts("one"))
        batch = await made.take(groups=1)
        [sample] = batch["groups"][0]["samples"]
        assert [span["version"] for span in sample["weight_versions"]] == [0, 0]
        assert batch["metrics"]["mixed_versions"] == 0


async def test_in_mode_abort_a_conversation_is_handed_back() -> None:
    """P10: with `on_pause: abort` a cut turn ends the loop, its environment is closed, and it begins again later."""
    sections = SECTIONS | {"agent": SECTIONS["agent"] | {"on_pause": "abort"}}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, **sections) as made:
        await everywhere(engine, made)
        Gated.let("two", "three")
        await engine.wait_requests(7)
        report = await made.pause()
        assert report.clean
        assert not report.parked
        await made.resume()
        for sample in await finish(engine, made):
            assert (sample["status"], sample["reward"], sample["meta"]["turns"]) == ("COMPLETED", 1.0, 2)
        assert len(Gated.closed) == 8


async def test_stopping_waits_for_clean_ups() -> None:
    """P14: a service that stops cancels the conversations, and is over when their environments are closed."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, **SECTIONS) as made:
        await everywhere(engine, made)
    assert sorted(Gated.closed) == ["four", "one", "three", "two"]
    assert made.service.survivors == ()


@pytest.mark.parametrize("context", [4096, _FULL])
async def test_routed_experts_of_what_was_appended_come_with_the_next_turn(context: int) -> None:
    """P27: one row a token but the last, also where the context was full and nothing stands after the model's turn."""
    async with FakeSGLang(weight_version="0", experts=TINY, handler_cancellation=True, context=context) as engine:
        engine.answer = lambda _: Reply(tokens=[65, 66])
        async with stage(engine, transport=LiftingTransport, experts=WANTED, **SECTIONS) as made:
            Gated.prepare(made.bell)
            Gated.let("one")
            await made.push(prompts("one"))
            await made.until(lambda: made.samples("ready") == 1)
            sample = one(made)
            check(sample)
            assert (sample.reward, len(engine.requests)) == ((0.5, 1) if context == _FULL else (1.0, 2))


async def test_a_stop_ends_a_hung_tool(tmp_path: Path) -> None:
    """P8 P10: the pause parks it, the stop ends it, with its process and what that started."""
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    sections = SECTIONS | {"agent": {"path": "rollout_agents.tools:Tools", "tools": ["tests.support.tools:forks"]}}
    async with FakeSGLang(weight_version="0") as engine:
        said = f'<tool_call>{{"name": "forks", "arguments": {{"fifo": "{fifo}"}}}}</tool_call>'
        engine.answer = lambda _: Reply(tokens=list(said.encode()))
        async with stage(engine, **sections) as made:
            await made.push(prompts("one"))
            async with asyncio.timeout(WAIT_S):
                pids = [int(line) for line in (await asyncio.to_thread(fifo.read_text)).split()]
            report = await made.pause()
            assert (report.clean, len(report.parked)) == (True, 1)
            assert all(map(lives, pids))
    until(lambda: not any(map(lives, pids)), "both are gone")
