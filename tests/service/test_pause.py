"""Pausing an engine that behaves: what is cut is kept, continued, and never passed off as whole."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import SampleFailed
from tests.support.fake_sglang import Call, FakeSGLang, Raw, Reply
from tests.support.loops import Oblivious, ToolUser
from tests.support.stage import PROMPT, stage

BIG = {"train_batch_size": 64, "max_staleness": 0}


async def test_a_clean_pause_with_many_in_flight() -> None:
    """With 64 in flight everything is aborted in one call, every token is kept, and nothing runs."""  # P9 P10
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=64, trainer=BIG) as made:
        engine.tokens_so_far = lambda call: call.prompt_ids[-1] % 5
        await engine.wait_running(64)
        report = await made.pause()
        assert report.clean
        assert (engine.running, engine.waiting) == (0, 0)
        assert engine.aborts == [{"abort_all": True}]
        assert report.workers["w0"].as_json() == {
            "in_flight": 64,
            "answered": 64,
            "late": 0,
            "cancelled": 0,
            "abandoned": 0,
            "residual": 0,
        }
        assert (made.groups("aborted"), made.samples("aborted"), made.groups("in_flight")) == (64, 64, 0)
        kept = {group.prompt.prompt_id: group.samples[0].response_length for group in made.live_groups()}
        assert kept == {f"p{n}": n % 5 for n in range(64)}
        assert {str(group.samples[0].status) for group in made.live_groups()} == {"ABORTED"}


async def test_what_was_cut_goes_on_with_its_prefix_and_the_rest_of_its_budget() -> None:
    """After resume the request holds prompt + tokens so far and asks for what is left of `max_tokens`."""  # P6 P10
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.tokens_so_far = 5
        await engine.wait_running(1)
        await made.pause()
        await made.resume()
        await engine.wait_requests(2)
        again = engine.requests[1]
        assert again.prompt_ids == [*PROMPT, 0, 101, 102, 103, 104, 105]
        assert again.max_new_tokens == 16 - 5
        assert again.rid != engine.requests[0].rid
        engine.release(again, tokens=[1, 2])
        batch = await made.take()
        [sample] = batch["groups"][0]["samples"]
        assert sample["response_ids"] == [101, 102, 103, 104, 105, 1, 2]
        assert len(sample["logprobs"]) == len(sample["loss_mask"]) == 7
        assert (sample["status"], sample["finish_reason"], sample["engine_finish_reason"]) == (
            "COMPLETED",
            "stop",
            "stop",
        )
        assert (batch["metrics"]["aborted"], batch["metrics"]["continued"], batch["metrics"]["redone"]) == (1, 1, 0)


async def test_a_late_stop_is_aborted_and_goes_straight_to_its_judge() -> None:
    """An answer parsed after the epoch closed is ABORTED, unjudged; resumed, it costs no generation."""  # P3 P6
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.pause())
        await engine.wait_aborts(1)
        engine.release(tokens=[1, 2, 3])
        report = await pausing
        assert report.clean
        assert (report.workers["w0"].late, report.workers["w0"].answered) == (1, 1)
        [group] = made.live_groups()
        [sample] = group.samples
        assert (str(sample.status), sample.resume_at, sample.finish_reason) == ("ABORTED", "judge", "abort")
        assert sample.engine_finish_reason == "stop"
        assert (sample.response_ids, sample.reward) == ([1, 2, 3], None)
        assert not made.judge.seen
        await made.resume()
        batch = await made.take()
        [record] = batch["groups"][0]["samples"]
        assert (record["finish_reason"], record["response_ids"], record["reward"]) == ("stop", [1, 2, 3], 1.0)
        assert len(engine.requests) == 1


async def test_a_late_length_keeps_its_reason() -> None:
    """A late answer that had used its budget is judged after resume as `length`."""  # P3
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.pause())
        await engine.wait_aborts(1)
        engine.release(finish="length")
        await pausing
        await made.resume()
        [sample] = (await made.take())["groups"][0]["samples"]
        assert (sample["finish_reason"], len(sample["response_ids"])) == ("length", 16)
        assert len(engine.requests) == 1


async def test_an_abort_that_had_used_the_budget_is_a_length() -> None:
    """Cut with every token made, the sample is not asked for more: `length`, judged after resume."""  # P6
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.tokens_so_far = 16
        await engine.wait_running(1)
        await made.pause()
        await made.resume()
        [sample] = (await made.take())["groups"][0]["samples"]
        assert (sample["finish_reason"], sample["engine_finish_reason"]) == ("length", "abort")
        assert (len(sample["response_ids"]), len(engine.requests)) == (16, 1)


async def test_a_sample_cut_again_and_again_never_exceeds_its_budget() -> None:
    """Over five pauses the budget shrinks by what was made, and the answer is the concatenation."""  # P6
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.tokens_so_far = 3
        for turn in range(5):
            await engine.wait_requests(turn + 1)
            assert engine.requests[turn].max_new_tokens == 16 - 3 * turn
            await made.pause()
            await made.resume()
        await engine.wait_requests(6)
        assert engine.requests[5].max_new_tokens == 1
        engine.release(finish="length")
        [sample] = (await made.take())["groups"][0]["samples"]
        assert len(sample["response_ids"]) == 16
        assert sample["finish_reason"] == "length"


async def test_what_the_engine_queued_goes_on_from_its_prompt() -> None:
    """A request aborted in the engine's queue has no tokens: it is asked again as it was."""  # P10
    async with FakeSGLang(slots=1, weight_version="0") as engine, stage(engine, pushed=2) as made:
        await engine.until(lambda: engine.running == 1 and engine.waiting == 1, "one runs, one waits")
        assert (await made.pause()).clean
        await made.resume()
        await engine.wait_requests(4)
        assert sorted(len(call.prompt_ids) for call in engine.requests[2:]) == [4, 7]


async def test_an_invalid_answer_is_a_failure_also_while_an_abort_goes_on() -> None:
    """Rubbish that comes during a pause counts as a failure of the sample, not as an abort."""  # P4
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.pause())
        await engine.wait_aborts(1)
        engine.release(fate=Raw(b"{}"))
        assert (await pausing).clean
        [failed] = made.of(SampleFailed)
        assert (failed.reason, failed.final) == ("invalid_response", False)
        assert (made.samples("queued"), made.groups("aborted")) == (1, 1)
        engine.lose_aborts = False
        await made.resume()
        await engine.wait_requests(2)
        assert engine.requests[1].prompt_ids == [*PROMPT, 0]


async def test_members_that_are_done_wait_for_the_ones_that_were_cut() -> None:
    """COMPLETED members survive the pause; only the cut one is asked again, and each is judged once."""  # P5
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, trainer={"prompt_repeat_k": 3, "train_batch_size": 1}) as made,
    ):
        await engine.wait_running(3)
        engine.release(engine.requests[0], tokens=[1])
        engine.release(engine.requests[1], tokens=[2])
        await made.until(lambda: made.samples("ready") == 2)
        await made.pause()
        assert (made.samples("ready"), made.samples("aborted"), made.groups("aborted")) == (2, 1, 1)
        await made.resume()
        await engine.wait_requests(4)
        engine.release(tokens=[9])
        [group] = (await made.take())["groups"]
        assert [sample["response_ids"] for sample in group["samples"]] == [[1], [2], [101, 102, 103, 9]]
        assert len(made.judge.seen) == 3


async def test_an_agent_that_ignores_the_cut_cannot_pass_it_off_as_whole() -> None:
    """A loop that returns after its turn was cut leaves an ABORTED sample all the same."""  # P2 P15
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=1, agent={"path": "tests.support.loops:Oblivious"}) as made,
    ):
        loop: Oblivious = made.agent
        await engine.wait_running(1)
        assert (await made.pause()).clean
        assert len(loop.ended) == 1
        [group] = made.live_groups()
        assert (str(group.samples[0].status), group.samples[0].resume_at) == ("ABORTED", "generate")
        assert not made.judge.seen


async def test_parked_agents_keep_their_place() -> None:
    """Loops busy in their tool, or cut in a turn, are parked: listed, not cancelled, and go on after resume."""  # P10
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=2, agent={"path": "tests.support.loops:ToolUser"}) as made,
    ):
        loop: ToolUser = made.agent
        await engine.wait_running(2)
        engine.release(engine.requests[0], tokens=[1, 2])
        await made.until(lambda: loop.waiting == 1)
        report = await made.pause()
        assert report.clean
        assert len(report.parked) == 2
        assert report.ledger["samples"]["in_flight"] == 2
        assert made.service.status()["lanes"]["train"] == {"open": False, "in_flight": 0, "parked": 2}
        loop.go_on.set()
        await made.until(lambda: loop.waiting == 0)
        await made.resume()
        await engine.wait_requests(4)
        asked = {len(call.prompt_ids): call for call in engine.requests[2:]}
        assert set(asked) == {7, 8}  # prompt + cut turn; prompt + turn + tool
        engine.answer = lambda _: Reply(tokens=[3])
        engine.release(tokens=[3])
        batch = await made.take(groups=2)
        got = sorted(sample["response_ids"] for group in batch["groups"] for sample in group["samples"])
        assert got == [[1, 2, 7, 8, 3], [101, 102, 103, 3, 7, 8, 3]]
        assert loop.runs == 2


async def test_batches_are_taken_and_acked_while_paused() -> None:
    """`take_batch` and `ack` work from what is ready; what is not there is refused as `paused`."""

    def answer(call: Call) -> Reply | None:
        return Reply(tokens=2) if call.prompt_ids[-1] < 2 else None

    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = answer
        async with stage(engine, pushed=4) as made:
            await made.until(lambda: made.groups("ready") == 2 and made.groups("in_flight") == 2)
            await made.pause()
            batch = await made.take(groups=2)
            await made.service.ack(batch["batch_id"])
            assert made.groups("consumed") == 2
            with pytest.raises(NotNow) as refused:
                await made.take(step=1, groups=1, timeout_s=0.01)
            assert refused.value.type == "paused"
            waiting = made.start(made.take(step=1, groups=1))
            await made.resume()
            await engine.wait_requests(6)
            engine.release(tokens=1)
            assert len((await waiting)["groups"]) == 1


async def test_a_control_call_passes_by_stuck_data_connections() -> None:
    """With every data connection busy an abort is written at once, on the control connection."""  # P16
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=64, trainer=BIG) as made:
        engine.lose_aborts = True
        await engine.wait_running(64)
        loop = asyncio.get_running_loop()
        started = loop.time()
        pausing = made.start(made.pause(1.0))
        await engine.wait_aborts(1)
        assert loop.time() - started < 0.5
        engine.release(tokens=1)
        assert (await pausing).clean


async def test_no_abort_is_sent_once_the_pause_has_ended() -> None:
    """Aborts that are repeated stop with their pause; what starts after resume is left alone."""  # P17
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=4, pause={"abort_interval_s": 0.05}) as made,
    ):
        engine.lose_aborts = True
        await engine.wait_running(4)
        pausing = made.start(made.pause(1.0))
        await engine.wait_aborts(3)
        engine.lose_aborts = False
        assert (await pausing).clean
        sent = len(engine.aborts)
        await made.resume()
        await engine.wait_running(4)
        assert not [task for task in made.parts.tasks.live if task.get_name().startswith(("drain", "abort", "count"))]
        assert len(engine.aborts) == sent
        assert sent <= 6
