"""What must not stop the stage: groups that fail late, exceptions nobody foresaw, and takes that wait for others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import ComponentDied, SampleFailed
from rollout_svc.tasks import TaskOwner
from tests.support.bell import WAIT_S
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.judges import GroupJudge, Judge
from tests.support.stage import Stage, stage
from tests.support.virtual import soon

ONE = {"train_batch_size": 1, "max_staleness": 1}
"""Two groups may be admitted and not consumed."""


async def fails_for_good(made: Stage, reason: str) -> None:
    """Wait until the only group failed, and check that it was tried three times and no more."""
    await made.until(lambda: made.groups("failed") == 1)
    failed = made.of(SampleFailed)
    assert [failure.reason for failure in failed] == [reason] * len(failed)
    assert [failure.failures for failure in failed if failure.final] == [3]
    assert made.groups("admitted") == 1
    assert made.service.state == "running"


async def test_groups_that_fail_in_their_judge_make_room_for_others() -> None:
    """Every admitted group fails when all generation is over: the next prompts are started none the less."""  # P18
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=3, trainer=ONE) as made:
        engine.answer = lambda _: Reply(tokens=2)
        judge: Judge = made.judge
        judge.hold = True
        judge.verdict = lambda sample: 0.5 if sample.ground_truth == 2 else ValueError("no idea")
        engine.release()
        await made.until(lambda: judge.held == 2 and made.service.status()["producer"]["waiting_for"] == "max_groups")
        judge.release()
        batch = await made.take()
        assert batch["groups"][0]["prompt"]["id"] == "p2"
        assert made.groups("failed") == 2


async def test_the_last_groups_fail_in_their_judge_and_the_take_hears_of_it(tmp_path: Path) -> None:
    """A take that waits for the last groups is told `exhausted` when they fail, not at its timeout."""  # P22
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n')
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = lambda _: Reply(tokens=2)
        async with stage(engine, prompts={"jsonl": str(path), "epochs": 1}, ready=False) as made:
            judge: Judge = made.judge
            judge.hold = True
            judge.verdict = lambda _: ValueError("no idea")
            await made.service.ready()
            await made.until(lambda: judge.held == 2)
            taking = made.start(made.service.take_batch(0, 1, 600.0))
            await soon(20)  # the producer finds the end of the file, and the take waits
            assert made.parts.producer.exhausted
            judge.release()
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(NotNow) as refused:
                    await taking
            assert refused.value.type == "exhausted"
            assert made.groups("failed") == 2


@pytest.mark.parametrize(("source", "failed"), [("nothing", 0), ("refused", 2)])
async def test_a_take_hears_of_the_end_of_the_prompts(tmp_path: Path, source: str, failed: int) -> None:
    """Prompts that all fail before they start, or none at all: a take that waits is told `exhausted`."""  # P22
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('refused') }}")
    tokenizer = {"path": "bytes", "chat_template": str(template)}
    prompts = {"source": f"tests.support.sources:{source}"}
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, prompts=prompts, tokenizer=tokenizer, ready=False) as made,
    ):
        taking = made.start(made.service.take_batch(0, 1, 600.0))
        await soon()
        await made.service.ready()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(NotNow) as refused:
                await taking
        assert refused.value.type == "exhausted"
        assert (made.groups("failed"), engine.requests) == (failed, [])


async def test_a_leased_step_is_answered_while_another_take_waits() -> None:
    """A trainer that asks again for its step gets its batch at once, whoever waits for the next one."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2, trainer=ONE) as made:
        await engine.wait_running(1)
        engine.release(engine.requests[0])
        batch = await made.take(step=0)
        waiting = made.start(made.take(step=1))
        await made.until(made.parts.batches._turn.locked)
        again = await made.take(step=0, timeout_s=0.5)
        assert again["batch_id"] == batch["batch_id"]
        assert not waiting.done()
        await engine.wait_requests(2)
        engine.release()
        assert (await waiting)["batch_id"] != batch["batch_id"]


@pytest.mark.parametrize("judger", ["Judge", "GroupJudge"])
async def test_tokens_that_cannot_be_decoded_fail_their_sample(judger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tokenizer raises is a counted failure: FAILED after three, and never a loop."""  # P1 P4
    trainer = {"train_batch_size": 1, "prompt_repeat_k": 1}
    judging = {"path": f"tests.support.judges:{judger}"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, judger=judging, trainer=trainer) as made:
        engine.answer = lambda _: Reply(tokens=2)

        async def decode(_: object) -> str:
            raise OverflowError("no such id")

        monkeypatch.setattr(made.service.prepared.codec, "decode", decode)
        await made.push(1)
        await fails_for_good(made, "invalid_response")
        assert not made.judge.seen
        assert not made.of(ComponentDied)


@pytest.mark.parametrize("judger", ["Judge", "GroupJudge"])
async def test_an_exception_nobody_foresaw_is_counted_and_told(judger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the service itself fails its sample three times, is told each time, and ends."""  # P1 P4
    judging = {"path": f"tests.support.judges:{judger}"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, judger=judging) as made:
        engine.answer = lambda _: Reply(tokens=2)
        made.may_die = True

        async def judge(*_: object) -> None:
            raise ZeroDivisionError("unforeseen")

        monkeypatch.setattr(made.parts.judging, "judge", judge)
        await made.push(1)
        await fails_for_good(made, "internal")
        assert ["unforeseen" in death.error for death in made.of(ComponentDied)] == [True] * 3


async def test_an_agent_that_cancels_itself_is_a_counted_failure() -> None:
    """A cancellation nobody asked for is the agent's fault, not a pause: `agent_error`, FAILED after three."""  # P14
    agent = {"path": "tests.support.loops:Quitting"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=agent) as made:
        await fails_for_good(made, "agent_error")
        assert made.agent.runs == 3
        assert not engine.requests


async def test_a_group_judge_is_not_asked_again_before_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended at its rung, the pause returns; one `judge-group` task there was, and the group is judged later."""  # P13
    judger = {"path": "tests.support.judges:GroupJudge"}
    trainer = {"prompt_repeat_k": 2, "train_batch_size": 1}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, judger=judger, trainer=trainer) as made:
        judge: GroupJudge = made.judge
        judge.hold = True
        names: list[str] = []
        spawn = TaskOwner.spawn

        def spawning(owner: TaskOwner, name: str, *rest: Any, **options: Any) -> asyncio.Task[Any]:
            names.append(name)
            return spawn(owner, name, *rest, **options)

        monkeypatch.setattr(TaskOwner, "spawn", spawning)
        engine.answer = lambda _: Reply(tokens=2)
        await made.push(1)
        await made.until(lambda: len(judge.seen) == 1)
        report = await made.pause(2.0)
        assert report.clean
        assert [rung.name for rung in report.rungs] == ["gate", "abort", "judges", "report"]
        assert sum(name.startswith("judge-group:") for name in names) == 1
        assert (len(judge.seen), made.groups("aborted")) == (1, 1)
        judge.release()
        await made.resume()
        [group] = (await made.take())["groups"]
        assert [sample["reward"] for sample in group["samples"]] == [0.0, 1.0]
        assert (len(judge.seen), len(engine.requests)) == (2, 2)
