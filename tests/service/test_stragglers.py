"""What does not end when it is told to: fenced, named while it lives, and in nobody's way."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_sglang import FakeSGLang, Raw
from tests.support.judges import Judge
from tests.support.loops import Clinging, Half
from tests.support.stage import stage
from tests.support.virtual import soon

CLINGING = {"path": "tests.support.loops:Clinging"}
PAIR = {"train_batch_size": 1, "prompt_repeat_k": 2}


async def test_loops_that_cling_do_not_hold_the_producers_target() -> None:
    """As many as the target swallow their cancellation: after the resume their groups are all continued."""  # P12
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4, agent=CLINGING) as made:
        loop: Clinging = made.agent
        await engine.wait_running(4)
        engine.release(tokens=[1])
        await made.until(lambda: loop.waiting == 4)
        assert made.parts.rollouts.generating == 4
        report = await made.pause(0.5)
        assert len(report.abandoned) == 4
        assert made.parts.rollouts.generating == 0
        await made.resume()
        await engine.wait_requests(8)
        assert made.parts.rollouts.generating == 4
        loop.go_on.set()
        await made.until(lambda: len(loop.ended) == 4)  # those of before the pause
        assert made.parts.rollouts.generating == 4
        engine.release(tokens=[5])
        assert len((await made.take(groups=4))["groups"]) == 4


@pytest.mark.parametrize("deaf", [True, False])
async def test_a_judge_that_clings_is_named_while_it_lives(deaf: bool) -> None:
    """One that swallows its cancellation is in every report until it ends; one that ends is in none."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        judge: Judge = made.judge
        judge.hold, judge.deaf = True, deaf
        await engine.wait_running(1)
        engine.release()
        await made.until(lambda: judge.held == 1)
        [sample] = made.live_groups()[0].samples
        named = [(sample.sample_id, None)] if deaf else []
        report = await made.pause(0.5)
        assert [(left.sample_id, left.worker) for left in report.abandoned] == named
        assert report.clean is not deaf
        judge.hold = False
        await made.resume()
        await made.until(lambda: made.groups("ready") == 1)
        report = await made.pause(0.5)
        assert [(left.sample_id, left.worker) for left in report.abandoned] == named
        await made.resume()
        judge.release()
        await made.until(lambda: not made.parts.judging.clinging)
        assert (await made.pause(0.5)).clean


async def test_a_sibling_that_clings_to_a_failed_group_is_named_while_it_lives() -> None:
    """Its group is settled and gone, and the pause still says that a task of it runs on."""  # P9
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, agent=CLINGING, trainer=PAIR) as made,
    ):
        loop: Clinging = made.agent
        await engine.wait_running(2)
        engine.release(engine.requests[0])
        await made.until(lambda: loop.waiting == 1)
        samples = made.live_groups()[0].samples
        [clings] = [sample.sample_id for sample in samples if sample.response_ids]
        for turn in range(3):
            await engine.wait_requests(2 + turn)
            engine.release(engine.requests[1 + turn], fate=Raw(b"{}"))
        await made.until(lambda: made.groups("failed") == 1)
        report = await made.pause(0.5)
        assert [(left.sample_id, left.worker) for left in report.abandoned] == [(clings, None)]
        assert not report.clean
        await made.resume()
        loop.go_on.set()
        await made.until(lambda: not made.parts.rollouts.stragglers)
        assert (await made.pause(0.5)).clean


async def test_a_parked_member_keeps_its_place_beside_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the stuck one is handed back at the tasks rung, fenced, and continued; the parked one goes on."""  # P10
    agent = {"path": "tests.support.loops:Half"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, agent=agent, trainer=PAIR) as made:
        loop: Half = made.agent
        let_go, asked = asyncio.Event(), 0

        async def decode(_: object) -> str:
            nonlocal asked
            asked += 1
            made.bell.ring()
            while asked == 1 and not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    made.bell.ring()
            return "late" if asked == 1 else "text"

        monkeypatch.setattr(made.service.prepared.codec, "decode", decode)
        await made.push(1)
        await engine.wait_running(2)
        engine.release(tokens=[1, 2])
        await made.until(lambda: loop.waiting == 1 and asked == 1)
        parked, stuck = made.live_groups()[0].samples
        held, fenced = parked.attempt, stuck.attempt
        report = await made.pause(0.5)
        assert report.parked == [parked.sample_id]
        assert [(left.sample_id, left.worker) for left in report.abandoned] == [(stuck.sample_id, None)]
        assert (parked.attempt, str(parked.status)) == (held, "GENERATING")
        assert (str(stuck.status), stuck.resume_at) == ("ABORTED", "judge")
        assert stuck.attempt > fenced
        await made.resume()
        await made.until(lambda: str(stuck.status) == "COMPLETED")
        let_go.set()
        await made.until(lambda: not made.parts.rollouts.stragglers)
        loop.go_on.set()
        [group] = (await made.take())["groups"]
        assert [sample["response_ids"] for sample in group["samples"]] == [[1, 2], [1, 2]]
        assert [sample["response"] for sample in group["samples"]] == ["text", "text"]
        assert parked.attempt == held
        assert (loop.runs, len(engine.requests)) == (2, 2)


async def test_an_earlier_deadline_holds_at_the_tasks_rung_too() -> None:
    """A pause that joins while the first one waits for tasks that cling returns by its own deadline."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=CLINGING) as made:
        loop: Clinging = made.agent
        await engine.wait_running(1)
        engine.release()
        await made.until(lambda: loop.waiting == 1)
        slow = made.start(made.pause(3.0))
        await made.until(lambda: bool(made.parts.rollouts.stragglers))
        await soon()  # by now the first pause waits for the task it cancelled
        quick = await made.pause(0.05)
        assert await slow is quick
        assert [left.worker for left in quick.abandoned] == [None]
        loop.go_on.set()
