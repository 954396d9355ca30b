"""Workers that fail, die and return: the sample pays nothing, the prompt is not used up, the weights are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import ConfigError, NotNow
from rollout_svc.events import ProducerWaiting, RequestRetried, SampleFailed, WorkerChanged
from rollout_svc.workers.worker import WorkerState
from tests.support.answers import two_tokens as answered
from tests.support.fake_sglang import Call, Cut, FakeSGLang, Reply, Reset, Status
from tests.support.faults import Fault
from tests.support.loops import TOOL_IDS
from tests.support.stage import PROMPT, Stage, lines, stage

WORKER_FAULTS: dict[str, Fault] = {
    **{str(code): Status(code) for code in (401, 403, 404, 429, 500, 502, 503, 529)},
    "reset": Reset(),
    "cut": Cut(),
}


async def assert_untouched(made: Stage, prompts: int) -> None:
    """No prompt was used up, and a take says what is the matter."""
    assert (made.groups("admitted"), len(made.source)) == (0, prompts)
    await made.until(lambda: made.parts.producer.waiting == "no_worker")
    with pytest.raises(NotNow) as refused:
        await made.take(timeout_s=0.01)
    assert refused.value.type == "not_enough"
    assert refused.value.detail["waiting_for"] == "no_worker"
    assert refused.value.detail["can_be_met"] is True


@pytest.mark.parametrize("name", WORKER_FAULTS)
async def test_a_worker_that_fails_costs_the_sample_nothing(name: str) -> None:
    """The other worker takes over, under a new wire id, and no attempt is counted."""  # P4 P20
    async with (
        FakeSGLang(weight_version="0") as bad,
        FakeSGLang(weight_version="0") as good,
        stage(bad, good, pushed=4) as made,
    ):
        await made.until(lambda: bad.running == 2 and good.running == 2)
        good.answer = answered
        good.release()
        for call in list(bad.requests):
            bad.finish(call, WORKER_FAULTS[name])
        batch = await made.take(groups=4)
        assert not made.of(SampleFailed)
        assert batch["metrics"]["failed"] == {}
        assert batch["metrics"]["redone"] == 0
        rids = [call.rid for call in bad.requests + good.requests]
        assert len(set(rids)) == len(rids) == 6
        assert {len(rid) for rid in rids} == {32}
        assert len(made.of(RequestRetried)) == 2


async def test_what_an_engine_asks_for_is_waited_for() -> None:
    """`Retry-After` of a 429 sets the pause before the next try; nothing is asked in between."""  # P20
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        loop = asyncio.get_running_loop()
        await engine.wait_running(1)
        engine.answer = answered
        asked = loop.time()
        engine.release(fate=Status(429, headers={"Retry-After": "0.4"}))
        await made.take()
        assert loop.time() - asked >= 0.4
        assert [retried.sleep_s for retried in made.of(RequestRetried)] == [0.4]
        assert len(engine.requests) == 2


async def test_a_back_off_ends_when_the_gate_closes() -> None:
    """A pause does not wait for a sample that sleeps between two tries; it goes on after resume."""  # P8 P20
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.release(fate=Status(503, headers={"Retry-After": "25"}))
        await made.until(lambda: bool(made.of(RequestRetried)))
        report = await made.pause(2.0)
        assert report.clean
        assert report.elapsed_s < 1.0
        assert (made.samples("aborted"), made.groups("aborted")) == (1, 1)
        await made.resume()
        await engine.wait_requests(2)


async def test_a_wrong_key_is_refused_at_the_start() -> None:
    """The settings cannot work with what the engine answered: nothing begins, and a line says why."""  # P35
    async with (
        FakeSGLang(api_key="right") as engine,
        stage({"url": engine.url, "api_key": "wrong"}, pushed=3, ready=False) as made,
    ):
        with pytest.raises(ConfigError, match=f"workers.0.api_key: w0 at {engine.url} refuses the key: .*401"):
            await made.service.ready()
        assert not engine.requests
        assert made.service.state == "starting"


async def test_engines_that_do_not_serve_the_same_are_refused_at_the_start() -> None:
    """Their samples would be trained on together."""  # P35
    async with (
        FakeSGLang(model_path="one") as one,
        FakeSGLang(model_path="other") as other,
        stage(one, other, ready=False) as made,
    ):
        with pytest.raises(ConfigError, match=r"workers.1.url: w1 at .* has model 'other', w0 at .* has 'one'"):
            await made.service.ready()


async def test_a_wrong_key_uses_up_no_prompt() -> None:
    """An engine that refuses our key is left alone; once the key is right the run begins."""  # P18
    async with FakeSGLang(weight_version="0", api_key="right") as engine, stage(pushed=3) as made:
        await made.service.add_worker(WorkerConfig(url=engine.url, api_key="wrong"))
        await made.until(lambda: made.worker().state is not WorkerState.STARTING and bool(made.of(ProducerWaiting)))
        assert made.worker().state is WorkerState.RECOVERING
        assert "unauthorized" in made.worker().reason
        await assert_untouched(made, 3)
        assert not engine.requests
        engine.answer = answered
        engine.api_key = "wrong"
        assert len((await made.take(groups=3))["groups"]) == 3


async def test_a_key_that_is_revoked_stops_the_run_and_loses_nothing() -> None:
    """401 in the middle of the run: the breaker opens, what was admitted goes back, nothing more is admitted."""  # P18
    async with (
        FakeSGLang(weight_version="0", api_key="k") as engine,
        stage({"url": engine.url, "api_key": "k"}, pushed=20) as made,
    ):
        await engine.wait_running(4)
        engine.api_key = "other"
        engine.release(tokens=1)
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        await made.until(lambda: made.groups("in_flight") == 0)
        admitted, left = made.groups("admitted"), len(made.source)
        assert admitted + left == 20
        assert not made.of(SampleFailed)
        await made.until(lambda: len([e for e in made.of(WorkerChanged) if e.worker == "w0"]) >= 2)
        assert (made.groups("admitted"), len(made.source)) == (admitted, left)
        engine.answer = answered
        engine.api_key = "k"
        batch = await made.take(groups=8)
        assert len(batch["groups"]) == 8
        assert not made.of(SampleFailed)


async def test_with_every_worker_down_the_producer_waits() -> None:
    """Dead engines use up no prompt; when one returns the run goes on by itself."""  # P18 P19
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=30) as made,
    ):
        await made.until(lambda: one.running == 2 and two.running == 2)
        await one.kill()
        await two.kill()
        await made.until(lambda: made.groups("in_flight") == 0 and made.parts.producer.waiting == "no_worker")
        admitted, left = made.groups("admitted"), len(made.source)
        assert (admitted, left) == (4, 26)
        assert not made.of(SampleFailed)
        one.answer = answered
        await one.listen()
        batch = await made.take(groups=4)
        assert len(batch["groups"]) == 4
        assert {str(span["version"]) for span in batch["groups"][0]["samples"][0]["weight_versions"]} == {"0"}


async def test_without_a_worker_nothing_starts_and_one_can_be_added() -> None:
    """An empty fleet has a plan of 0 and waits; an engine that is added gets traffic."""  # P18
    async with FakeSGLang(weight_version="0") as engine, stage(pushed=2) as made:
        assert made.service.concurrency()["required"] == 0
        await assert_untouched(made, 2)
        engine.answer = answered
        added = await made.service.add_worker(WorkerConfig(url=engine.url))
        assert added["id"] == "w0"
        assert len((await made.take(groups=2))["groups"]) == 2


async def test_a_worker_that_is_removed_finishes_what_it_runs() -> None:
    """DRAINING takes nothing new, and the worker is gone with its last answer."""
    async with (
        FakeSGLang(weight_version="0") as leaving,
        FakeSGLang(weight_version="0") as staying,
        stage(leaving, staying, pushed=8) as made,
    ):
        await made.until(lambda: leaving.running == 2 and staying.running == 2)
        assert await made.service.remove_worker("w0") == {"id": "w0", "state": "DRAINING"}
        leaving.release(tokens=1)
        await made.until(lambda: "w0" not in made.parts.pool.workers)
        await made.until(lambda: staying.running == 4)
        assert len(leaving.requests) == 2
        staying.answer = answered
        staying.release(tokens=1)
        assert len((await made.take(groups=4))["groups"]) == 4


async def test_a_poison_prompt_opens_no_breaker() -> None:
    """All samples of one prompt failing at once are one witness: the workers stay in traffic for the others."""  # P20
    trainer = {"prompt_repeat_k": 8, "train_batch_size": 3}
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as two,
        stage(one, two, pushed=1, trainer=trainer) as made,
    ):
        await made.until(lambda: one.running + two.running == 8)
        one.answer = two.answer = lambda _: Status(500)
        one.release(fate=Status(500))
        two.release(fate=Status(500))
        await made.until(lambda: len(made.of(RequestRetried)) >= 16)
        assert {str(worker.state) for worker in made.parts.pool.workers.values()} == {"ACTIVE"}


async def test_a_poison_prompt_fails_alone() -> None:
    """A prompt that makes engines answer 500, which answer others meanwhile, fails for good, alone."""  # P20

    def answer(call: Call) -> Reply | Fault:
        return Status(500) if call.prompt_ids[-1] == 66 else Reply(tokens=1)

    async with FakeSGLang(weight_version="0") as one, FakeSGLang(weight_version="0") as two:
        one.answer = two.answer = answer
        async with stage(one, two, producer={"max_attempts": 1}) as made:
            await made.push(1, first=66)
            step = 0
            while not made.groups("failed"):
                await made.push(1, first=100 + step)
                batch = await made.take(step=0, groups=1)
                await made.service.ack(batch["batch_id"])
                step += 1
            assert [failed.reason for failed in made.of(SampleFailed) if failed.final] == ["poison"]
            assert not [changed for changed in made.of(WorkerChanged) if changed.after == "RECOVERING"]
            assert made.groups("consumed") == step


async def test_what_failed_before_an_answer_is_no_poison() -> None:
    """An answer is progress: failures of one turn are not added to those of the next."""  # P20
    agent = {"path": "tests.support.loops:ToolUser"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, agent=agent) as made:
        made.agent.go_on.set()
        await made.push(1)
        for turn in range(2):
            for _ in range(2):  # two a turn: four of them would be poison
                await engine.wait_running(1)
                [call] = engine.calls("running")
                made.worker().answered += 1  # another sample was answered
                engine.finish(call, Status(503))
                await made.until(lambda: not engine.running)
            await engine.wait_running(1)
            assert [len(group.samples[0].worker_failures) for group in made.live_groups()] == [2], turn
            engine.release(tokens=1)
        await made.take()
        assert not made.of(SampleFailed)


async def test_a_worker_that_dies_gives_its_requests_to_the_other() -> None:
    """Killed in mid-flight, its requests go on elsewhere, once, with their prefix, and nobody waits."""  # P19
    async with (
        FakeSGLang(weight_version="0") as dying,
        FakeSGLang(weight_version="0") as living,
        stage(dying, living, pushed=4) as made,
    ):
        await made.until(lambda: dying.running == 2 and living.running == 2)
        await made.pause()
        await made.resume()
        await made.until(lambda: dying.running == 2 and living.running == 2)
        moving = sorted(call.prompt_ids for call in dying.calls("running"))
        assert all(len(prompt) == len(PROMPT) + 1 + 3 for prompt in moving)
        await dying.kill()
        await living.wait_requests(6)
        assert sorted(call.prompt_ids for call in living.requests[4:]) == moving
        assert not made.of(SampleFailed)
        living.release(tokens=1)
        assert len((await made.take(groups=4))["groups"]) == 4


async def test_a_loop_that_begins_again_begins_from_nothing() -> None:
    """An agent past its first turn whose engine dies is run anew: no turn is in its answer twice, and it is counted."""

    def answer(call: Call) -> Reply | None:
        return Reply(tokens=[len(call.prompt_ids)]) if len(call.prompt_ids) == 4 or made.agent.runs > 1 else None

    agent = {"path": "tests.support.loops:ToolUser"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, agent=agent) as made:
        made.agent.go_on.set()
        engine.answer = answer
        await made.push(1)
        await engine.wait_requests(2)
        for _ in range(4):  # as often as one call is tried
            await engine.wait_running(1)
            engine.release(fate=Status(503))
        batch = await made.take()
        [sample] = batch["groups"][0]["samples"]
        assert sample["response_ids"] == [4, *TOOL_IDS, 7]
        assert sample["loss_mask"] == [1, 0, 0, 1]
        assert (made.agent.runs, batch["metrics"]["redone"], batch["metrics"]["continued"]) == (2, 1, 0)


async def test_a_silent_worker_is_declared_dead_and_its_requests_move() -> None:
    """An engine that refuses connections while its requests hang is noticed by its probe, not by a timeout."""  # P19
    async with (
        FakeSGLang(weight_version="0") as silent,
        FakeSGLang(weight_version="0") as living,
        stage(silent, living, pushed=4) as made,
    ):
        await made.until(lambda: silent.running == 2 and living.running == 2)
        silent.script("/ping", Reset(), times=None)
        await silent.refuse()
        await made.until(lambda: made.worker(0).state is WorkerState.DEAD)
        await living.wait_requests(4)
        await silent.listen()
        silent.heal()
        await made.until(lambda: made.worker(0).state is WorkerState.ACTIVE)
        silent.release()


async def test_a_worker_that_falls_silent_while_it_is_removed_lets_its_requests_go() -> None:
    """Nobody waits out a whole time limit at an engine that is being removed and is not there any more."""  # P19
    async with (
        FakeSGLang(weight_version="0") as silent,
        FakeSGLang(weight_version="0") as living,
        stage(silent, living, pushed=4) as made,
    ):
        await made.until(lambda: silent.running == 2 and living.running == 2)
        await made.service.remove_worker("w0")
        silent.script("/ping", Reset(), times=None)
        await silent.refuse()
        await living.wait_requests(4)
        await made.until(lambda: "w0" not in made.parts.pool.workers)


@pytest.mark.parametrize("in_flight", [0, 1, 4])
async def test_a_restarted_engine_serves_nothing_under_old_weights(tmp_path: Path, in_flight: int) -> None:
    """Back with the label `default`, an engine makes no token that counts before it has its weights."""  # P19 P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        await made.pause()
        await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)})
        await made.resume()
        await made.push(in_flight)
        await engine.wait_running(in_flight)
        await engine.restart()
        engine.answer = answered
        await made.push(lines(1, first=50))
        batch = await made.take(step=1, groups=in_flight + 1)
        for group in batch["groups"]:
            assert [span["version"] for span in group["samples"][0]["weight_versions"]] == [1]
        assert made.groups("expired") == 0
        assert engine.weight_version == "1"
        assert not made.of(SampleFailed)
