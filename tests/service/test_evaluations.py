"""Evaluations: prompts answered and judged in lane `eval`, and what training sees of them, which is nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotFound, NotNow
from rollout_svc.evaluations import request as evaluation_request
from rollout_svc.events import EvaluationFinished, SampleFailed
from tests.support.fake_sglang import FakeSGLang, Reply, Status
from tests.support.stage import TASK, Stage, lines, stage

TWO = {"train_batch_size": 2}
DISK = {"kind": "disk", "path": "/weights/1"}


def ledger(made: Stage) -> dict[str, int]:
    """The groups of lane `eval`, those accounts that have some."""
    counts: dict[str, int] = made.parts.evaluations.as_json()["ledger"]["groups"]
    return {name: count for name, count in counts.items() if count}


async def test_every_prompt_is_answered_once_in_order() -> None:
    """One sample per prompt, judged, of one version, in the order asked for; the ledger of lane `eval` is settled."""
    async with FakeSGLang(weight_version="0", report_spans=True) as engine, stage(engine) as made:
        engine.answer = lambda call: Reply(tokens=[call.prompt_ids[-1], 7])
        made.judge.verdict = lambda sample: float(sample.ground_truth)
        answer = await made.service.evaluate(TASK, lines(5), timeout_s=5.0)
        assert list(answer) == ["groups"]
        assert [group["prompt"]["id"] for group in answer["groups"]] == [f"p{n}" for n in range(5)]
        for number, group in enumerate(answer["groups"]):
            assert set(group) == {"group_id", "task", "prompt", "samples"}
            [sample] = group["samples"]
            assert (sample["status"], sample["reward"], sample["response_ids"]) == ("COMPLETED", number, [number, 7])
            assert [span["version"] for span in sample["weight_versions"]] == [0]
        assert ledger(made) == {"admitted": 5, "consumed": 5}
        status = made.service.status()["evaluations"]
        assert (status["under_way"], status["in_flight"], status["waiting"]) == (0, 0, 0)


async def test_training_sees_nothing_of_it() -> None:
    """Not in buffer, ledger, tally or the producer's target; the task's settings are what they were."""  # P28
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2, trainer=TWO) as made:
        await engine.wait_running(2)
        before = made.parts.ledger.as_json(), made.parts.tally.snapshot()
        evaluating = made.start(made.evaluate(3, sampling={"max_tokens": 5, "temperature": 0.0}))
        await engine.wait_running(5)
        status = made.service.status()
        assert (status["lanes"]["eval"]["in_flight"], status["evaluations"]["under_way"]) == (3, 1)
        assert made.parts.rollouts.generating == 2
        for call in engine.calls("running")[2:]:
            engine.release(call, tokens=[1])
        assert len(await evaluating) == 3
        assert (made.parts.ledger.as_json(), made.parts.tally.snapshot()) == before
        assert not made.parts.buffer.ready
        sent = [request.sampling for request in engine.requests]
        assert [(drawn["max_new_tokens"], drawn["temperature"]) for drawn in sent] == [(16, 1.0)] * 2 + [(5, 0.0)] * 3
        assert made.service.config.tasks[0].sampling.max_tokens == 16
        engine.release(tokens=[2])
        batch = await made.take(groups=2)
        assert {group["prompt"]["id"] for group in batch["groups"]} == {"p0", "p1"}


async def test_routed_experts_are_never_asked_for() -> None:
    """The task's wish for them is training's alone; an evaluation that wishes for them is refused."""  # P28
    sampling = {"max_tokens": 16, "extra": {"return_routed_experts": True, "min_p": 0.1}}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, sampling=sampling) as made:
        engine.answer = lambda _: Reply(tokens=[1])
        await made.evaluate(1)
        [sent] = engine.requests
        assert "return_routed_experts" not in repr(sent.body)
        assert "min_p" in repr(sent.body)
        for how in (
            {"sampling": {"extra": {"return_routed_experts": True}}},
            {"prompts": [{"input_ids": [1], "engine_extra": {"return_routed_experts": True}}]},
        ):
            with pytest.raises(BadRequest, match="return_routed_experts"):
                await made.evaluate(**{"prompts": 1} | how)
        assert made.service.config.tasks[0].sampling.extra["return_routed_experts"] is True


async def test_a_failed_sample_is_what_it_is() -> None:
    """After its attempts it comes as FAILED with its reason and no reward, beside those that have one."""  # P2 P4
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.answer = lambda call: Status(422) if call.prompt_ids[-1] == 91 else Reply(tokens=[1])
        good, bad, last = await made.evaluate(3)
        assert [good["status"], bad["status"], last["status"]] == ["COMPLETED", "FAILED", "COMPLETED"]
        assert (bad["reason"], bad["reward"], bad["response_ids"]) == ("rejected_by_engine", None, [])
        assert len(made.of(SampleFailed)) == 3  # its attempts
        assert ledger(made) == {"admitted": 3, "consumed": 2, "failed": 1}
        assert not made.parts.tally.failed


async def test_its_own_limit_holds() -> None:
    """`evaluation.max_in_flight` requests are under way at once, over all workers and evaluations."""
    evaluation = {"max_in_flight": 3}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, evaluation=evaluation) as made:
        two = [made.start(made.evaluate(4)) for _ in range(2)]
        for left in range(8, 0, -1):
            await engine.wait_running(min(3, left))
            assert engine.running <= 3
            assert made.parts.evaluations.generating <= 3
            engine.release(engine.calls("running")[0], tokens=[1])
        await asyncio.gather(*two)
        assert ledger(made) == {"admitted": 8, "consumed": 8}


async def test_several_share_the_limit() -> None:
    """A small evaluation beside a large one gets the places that become free until both have as many."""
    evaluation = {"max_in_flight": 4}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, evaluation=evaluation) as made:
        large = made.start(made.evaluate(12))
        await engine.wait_running(4)
        small = made.start(made.evaluate(lines(2, first=50)))
        await made.until(lambda: len(made.parts.evaluations._open) == 2)
        for call in engine.calls("running")[:2]:
            engine.release(call, tokens=[1])
        await engine.wait_requests(6)
        assert {call.prompt_ids[-1] for call in engine.calls("running")} >= {50, 51}
        for call in engine.calls("running"):
            if call.prompt_ids[-1] in {50, 51}:
                engine.release(call, tokens=[1])
        assert len(await small) == 2
        assert not large.done()
        engine.answer = lambda _: Reply(tokens=[1])
        engine.release(tokens=[1])
        assert len(await large) == 12


# -- weights -------------------------------------------------------------------------------------------------


async def test_another_version_than_the_fleet_has_is_refused() -> None:
    """`version` is a condition: the fleet is there, or the answer says where it is."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        with pytest.raises(Conflict) as refused:
            await made.evaluate(1, version=4)
        assert (refused.value.type, refused.value.detail) == ("weight_version", {"version": 4, "weight_version": 0})
        engine.answer = lambda _: Reply(tokens=[1])
        assert len(await made.evaluate(1, version=0)) == 1


async def test_weights_that_move_end_it() -> None:
    """Cut by the pause of an update, it does not go on under other weights: both versions are named."""  # P7
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(3))
        await engine.wait_running(3)
        engine.release(engine.calls("running")[0], tokens=[1])
        await made.until(lambda: ledger(made).get("ready") == 1)
        await made.service.update_weights(1, DISK, pause={"deadline_s": 2.0})
        with pytest.raises(Conflict) as moved:
            await evaluating
        assert moved.value.type == "version_changed"
        assert moved.value.detail == {"version": 0, "weight_version": 1, "finished": 1, "wanted": 3}
        assert len(engine.requests) == 3
        assert ledger(made) == {"admitted": 3, "expired": 3}


@pytest.mark.parametrize("odd", ["7", "default"])
async def test_tokens_of_other_weights_are_never_returned(odd: str) -> None:
    """An answer that an engine began under weights the fleet does not have, or has no name for, is a failure."""  # P7
    async with FakeSGLang(weight_version="0", report_spans=True) as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(2))
        await engine.wait_running(2)
        engine.calls("running")[0].labels[:] = [(odd, 0), ("0", 1)]
        engine.release(tokens=[1, 2])
        found = {sample["status"]: sample for sample in await evaluating}
        assert set(found) == {"COMPLETED", "FAILED"}
        assert (found["FAILED"]["reason"], found["FAILED"]["response_ids"]) == ("odd_version", [])
        assert [event.reason for event in made.of(SampleFailed)] == ["odd_version"]


async def test_weights_that_move_when_all_is_there_are_too_late_to_matter() -> None:
    """Complete in the very step in which the weights move, it is answered: its tokens are of its version."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.answer = lambda _: Reply(tokens=[1])
        evaluations = made.parts.evaluations
        evaluating = made.start(made.evaluate(1))
        await made.until(lambda: any(e.complete for e in evaluations._open.values()) or evaluating.done())
        made.parts.fleet.became(1, None)
        evaluations._check_versions()
        assert len(await evaluating) == 1


async def test_weights_that_move_under_frozen_requests_end_it() -> None:
    """In `keep` its requests live through the update, and are aborted then: no token of theirs is returned."""  # P7
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(2))
        await engine.wait_running(2)
        await made.service.update_weights(1, DISK, pause={"mode": "keep", "deadline_s": 2.0})
        with pytest.raises(Conflict) as moved:
            await evaluating
        assert moved.value.type == "version_changed"
        await engine.wait_idle()
        assert ledger(made) == {"admitted": 2, "expired": 2}


async def test_it_begins_with_the_weights_it_finds_after_a_pause() -> None:
    """Without a version it is pinned when its first prompt starts, not while the stage is paused."""
    async with FakeSGLang(weight_version="0", report_spans=True) as engine, stage(engine) as made:
        engine.answer = lambda _: Reply(tokens=[1])
        await made.pause(2.0)
        evaluating = made.start(made.evaluate(1))
        await made.until(lambda: ledger(made).get("queued") == 1)
        await made.service.update_weights(1, DISK)
        await made.resume()
        [sample] = await evaluating
        assert [span["version"] for span in sample["weight_versions"]] == [1]


# -- the end -------------------------------------------------------------------------------------------------


async def test_it_ends_by_its_deadline() -> None:
    """When the time is up the rest is aborted at the engine and settled; the answer says what is missing."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        loop = asyncio.get_running_loop()
        started = loop.time()
        evaluating = made.start(made.evaluate(3, timeout_s=0.5))
        await engine.wait_running(3)
        engine.release(engine.calls("running")[0], tokens=[1])
        with pytest.raises(NotNow) as late:
            await evaluating
        assert loop.time() - started < 0.6
        detail = late.value.detail
        assert (late.value.type, detail["finished"], detail["wanted"], detail["weight_version"]) == (
            "not_enough",
            1,
            3,
            0,
        )
        assert [found["where"] for found in detail["oldest"]] == ["generating"] * 2
        assert ledger(made) == {"admitted": 3, "expired": 3}
        await engine.wait_idle()
        [event] = made.of(EvaluationFinished)
        assert (event.outcome, event.finished) == ("not_enough", 1)


async def test_one_that_ends_while_it_is_frozen_is_aborted_at_resume() -> None:
    """A frozen engine cannot drop a request: it stays counted there, weights move around it, and then it goes."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        await made.pause(2.0, mode="keep")
        evaluating.cancel()
        await asyncio.wait({evaluating})
        assert ledger(made) == {"admitted": 1, "expired": 1}
        assert (len(made.worker().calls), engine.frozen, engine.aborts) == (2, 2, [])
        assert (await made.service.update_weights(1, DISK))["version"] == 1
        await made.resume()
        await engine.until(lambda: engine.running == 1, "one is left")
        await made.until(lambda: not made.parts.pool.in_flight["eval"])
        assert not made.parts.rollouts.stragglers
        engine.release(tokens=[1])
        await made.take(step=1)


async def test_a_caller_that_leaves_ends_it() -> None:
    """Cancelling the call propagates; its requests are aborted at the engine, and nothing of it is left."""  # P14
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(3))
        await engine.wait_running(3)
        evaluating.cancel()
        await asyncio.wait({evaluating})
        assert evaluating.cancelled()
        assert ledger(made) == {"admitted": 3, "expired": 3}
        await engine.wait_idle()
        await engine.wait_aborts(3)
        assert not made.parts.evaluations._of_group


async def test_its_end_is_not_cut_short() -> None:
    """Cancelled again while it ends, it still leaves nothing: no group, no request, no task."""  # P14
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(4))
        await engine.wait_running(4)
        while not evaluating.done():
            evaluating.cancel()
            await asyncio.sleep(0)
        assert evaluating.cancelled()
        await made.until(lambda: not made.parts.evaluations._open)
        assert ledger(made) == {"admitted": 4, "expired": 4}
        await engine.wait_idle()


async def test_a_dead_component_ends_it() -> None:
    """A part that dies fails an evaluation at once, with its traceback, and every later one."""  # P23
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        made.may_die = True
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(1)
        made.service._died("part", RuntimeError("it broke"), critical=True)
        for call in (evaluating, made.evaluate(1)):
            with pytest.raises(NotNow) as dead:
                await call
            assert (dead.value.type, "it broke" in dead.value.detail["traceback"]) == ("failed", True)


async def test_a_stop_ends_it() -> None:
    """A service that stops ends its evaluations with a word, and waits for none."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(2))
        await engine.wait_running(2)
        await made.service.stop()
        with pytest.raises(NotNow) as stopped:
            await evaluating
        assert stopped.value.type == "stopping"
        assert ledger(made) == {"admitted": 2, "expired": 2}


async def test_no_worker_is_waited_for() -> None:
    """Without a worker in traffic it waits, with its prompts, and goes on when one is back."""  # P18
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        evaluating = made.start(made.evaluate(2))
        await engine.wait_running(2)
        await engine.restart()
        engine.weight_version = "0"
        engine.answer = lambda _: Reply(tokens=[1])
        assert [sample["status"] for sample in await evaluating] == ["COMPLETED"] * 2


# -- pauses --------------------------------------------------------------------------------------------------


async def test_a_paused_lane_is_said() -> None:
    """Paused when its time is up, it answers `paused`; nothing was sent."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        await made.pause(2.0, lanes=("eval",))
        with pytest.raises(NotNow) as paused:
            await made.evaluate(1, timeout_s=0.1)
        assert (paused.value.type, paused.value.detail["waiting_for"]) == ("paused", "gate_closed")
        assert not engine.requests


async def test_frozen_it_stands_still_and_goes_on() -> None:
    """`keep` freezes both lanes: after resume the same requests end, and count."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        assert (await made.pause(2.0, mode="keep")).clean
        assert engine.frozen == 2
        await made.resume()
        engine.release(tokens=[1])
        assert len(await evaluating) == 1
        assert len(engine.requests) == 2


async def test_it_goes_on_from_its_tokens_whatever_training_does() -> None:
    """A task whose training begins again after a cut: its evaluation does not, and training still does."""  # P6
    task = {
        "name": TASK,
        "prompts": {"push": True},
        "agent": {"name": "single_turn"},
        "judger": {"path": "tests.support.judges:Judge"},
        "sampling": {"max_tokens": 16},
        "partial_rollout": False,
    }
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, tasks=[task]) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        engine.tokens_so_far = 3
        await made.pause(2.0)
        await made.resume()
        await engine.wait_requests(4)
        again = {call.prompt_ids[3]: len(call.prompt_ids) for call in engine.requests[2:]}
        assert again == {0: 4, 90: 7}
        engine.release(tokens=[1])
        assert len(await evaluating) == 1


async def test_its_judge_observes_a_pause() -> None:
    """A judge of lane `eval` is cancelled by a pause of that lane; the answer is judged after resume."""  # P13
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        made.judge.hold = True
        engine.answer = lambda _: Reply(tokens=[1])
        evaluating = made.start(made.evaluate(1))
        await made.until(lambda: made.judge.held == 1)
        assert (await made.pause(2.0, lanes=("eval",))).clean
        assert len(made.judge.cancelled) == 1
        made.judge.release()
        await made.resume()
        [sample] = await evaluating
        assert (sample["reward"], len(engine.requests)) == (1.0, 1)


# -- what is asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [{"input_ids": [1]}, {"input_ids": ["x"]}]}, "prompts.1.input_ids"),
        ({"prompts": [{"text": "needs a tokenizer"}]}, "prompts.0.text"),
        ({"prompts": [{"input_ids": [1], "more": 1}]}, "prompts.0.more"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"max_token": 1}}, "sampling.max_token"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
    ],
)
async def test_what_is_wrong_is_refused_at_its_path(how: dict[str, Any], path: str) -> None:
    """P35: a bad evaluation is refused before anything of it is admitted."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        with pytest.raises(BadRequest) as refused:
            await made.evaluate(**{"prompts": 1} | how)
        assert [problem["path"] for problem in refused.value.detail] == [path]
        assert not ledger(made)


async def test_an_unknown_task_and_too_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: the task has to exist, and an evaluation has a size that one body can answer."""
    monkeypatch.setattr(evaluation_request, "MAX_PROMPTS", 2)
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        with pytest.raises(NotFound):
            await made.service.evaluate("other", lines(1), timeout_s=1.0)
        with pytest.raises(BadRequest, match="prompts"):
            await made.evaluate(3)


async def test_what_is_handed_in_is_copied() -> None:
    """What a caller does to its own settings afterwards changes nothing."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        given: dict[str, Any] = {"extra": {"min_p": 0.1}}
        evaluating = made.start(made.evaluate(1, sampling=given))
        await engine.wait_running(1)
        given["extra"]["min_p"] = 0.9
        [run] = made.parts.rollouts.runs(("eval",))
        assert run.runtime.sampling.extra == {"min_p": 0.1}
        engine.release(tokens=[1])
        await evaluating
