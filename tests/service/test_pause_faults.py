"""Pausing what does not want to stop: the report comes in time, and names exactly what was left behind."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang, Hang, Reply, Reset
from tests.support.judges import Judge
from tests.support.loops import Clinging
from tests.support.stage import stage
from tests.support.stores import Store


async def test_lost_aborts_are_sent_again() -> None:
    """An engine that takes an abort and does nothing is asked again, ever more slowly, until it obeys."""  # P9 P17
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2) as made:
        engine.lose_aborts = True
        await engine.wait_running(2)
        pausing = made.start(made.pause())
        await engine.wait_aborts(3)
        engine.lose_aborts = False
        report = await pausing
        assert report.clean
        assert len(engine.aborts) <= 6
        assert report.workers["w0"].answered == 2


async def test_a_hung_judge_is_ended_and_asked_again() -> None:
    """A judge that hangs is cancelled at its rung; its sample keeps its tokens and is judged after resume."""  # P8 P13
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        judge: Judge = made.judge
        judge.hold = True
        await engine.wait_running(1)
        engine.release(tokens=[1, 2])
        await made.until(lambda: judge.held == 1)
        report = await made.pause(1.0)
        assert report.clean
        assert [rung.name for rung in report.rungs] == ["gate", "abort", "judges", "report"]
        assert len(judge.cancelled) == 1
        [sample] = made.live_groups()[0].samples
        assert (str(sample.status), sample.resume_at, sample.response_ids) == ("ABORTED", "judge", [1, 2])
        judge.hold = False
        await made.resume()
        [record] = (await made.take())["groups"][0]["samples"]
        assert (record["reward"], record["finish_reason"]) == (1.0, "stop")
        assert len(engine.requests) == 1


async def test_a_judge_within_its_grace_counts() -> None:
    """A verdict that comes before the judges' rung completes its sample, although the gate is closed."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        judge: Judge = made.judge
        judge.hold = True
        await engine.wait_running(1)
        engine.release()
        await made.until(lambda: judge.held == 1)
        pausing = made.start(made.pause(5.0))
        await made.until(lambda: made.service.state == "pausing")
        judge.release()
        assert (await pausing).clean
        assert made.groups("ready") == 1


async def test_a_judge_that_answers_after_its_grace_changes_nothing() -> None:
    """A judge that swallows its cancellation and answers later writes nothing; the sample is judged anew."""  # P13
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        judge: Judge = made.judge
        judge.hold = judge.deaf = True
        judge.verdict = lambda _: 0.25
        await engine.wait_running(1)
        engine.release()
        await made.until(lambda: judge.held == 1)
        await made.pause(0.5)
        assert made.samples("aborted") == 1
        judge.release()
        await made.until(lambda: len(judge.late) == 1)
        assert made.samples("aborted") == 1
        judge.verdict = lambda _: 0.75
        await made.resume()
        assert (await made.take())["groups"][0]["samples"][0]["reward"] == 0.75


async def test_no_judge_starts_after_the_gate_closed() -> None:
    """Answers and queued judge calls at the moment of the pause observe it: nobody is judged until resume."""  # P13
    judger = {"path": "tests.support.judges:Judge", "concurrency": 1}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=3, judger=judger) as made:
        judge: Judge = made.judge
        judge.hold = True
        await engine.wait_running(3)
        engine.release()
        await made.until(lambda: judge.held == 1 and made.parts.pool.in_flight["train"] == 0)
        pausing = made.start(made.pause(0.5))
        await made.until(lambda: made.samples("aborted") == 2)
        assert len(judge.seen) == 1
        assert (await pausing).clean
        judge.release()
        await made.resume()
        assert len((await made.take(groups=3))["groups"]) == 3


async def test_a_synchronous_judge_that_hangs_is_killed() -> None:
    """A judge stuck in a process of its own does not keep the pause waiting; its process is killed."""  # P21
    judger = {"name": "regex", "pattern": "(a|aa)+$"}
    tokenizer = {"path": "bytes"}
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, judger=judger, tokenizer=tokenizer, sampling={"max_tokens": 64}) as made,
    ):
        await made.push([{"id": "slow", "text": "?"}])
        await engine.wait_running(1)
        engine.release(tokens=[*b"a" * 60, *b"b"])
        await made.until(lambda: made.parts.judging.pending(("train",)) == 1)
        report = await made.pause(1.0)
        assert report.clean
        assert made.samples("aborted") == 1


async def test_a_task_that_swallows_cancellation_is_fenced_and_named() -> None:
    """Its group is back in the buffer with its tokens; what the task writes later is refused and counted."""  # P8 P10
    agent = {"path": "tests.support.loops:Clinging"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=agent) as made:
        loop: Clinging = made.agent
        await engine.wait_running(1)
        engine.release(tokens=[1, 2])
        await made.until(lambda: loop.waiting == 1)
        report = await made.pause(0.5)
        assert not report.clean
        [left] = report.abandoned
        assert (left.worker, left.sample_id) == (None, made.live_groups()[0].samples[0].sample_id)
        assert [rung.name for rung in report.rungs] == ["gate", "abort", "judges", "http", "tasks", "report"]
        [sample] = made.live_groups()[0].samples
        assert (str(sample.status), sample.response_ids) == ("ABORTED", [1, 2])
        loop.go_on.set()
        await made.until(lambda: len(loop.ended) == 1)
        assert made.service.status()["ledger"]["late_discarded"] >= 1
        assert sample.response_ids == [1, 2]
        assert made.worker().state is WorkerState.ACTIVE
        await made.resume()
        await engine.wait_requests(2)
        engine.release(tokens=[5])
        [record] = (await made.take())["groups"][0]["samples"]
        assert record["response_ids"] == [5, 1]  # its turn was whole, so its loop began again, from nothing


async def test_a_black_holed_engine_does_not_hold_the_pause() -> None:
    """An engine that answers nothing at all, control calls included, is abandoned, in time."""  # P8 P12
    async with (
        FakeSGLang(weight_version="0") as hole,
        FakeSGLang(weight_version="0") as good,
        stage(hole, good, pushed=4) as made,
    ):
        await made.until(lambda: hole.running == 2 and good.running == 2)
        for path in ("/abort_request", "/v1/loads", "/ping", "/model_info"):
            hole.script(path, Hang(), times=None)
        report = await made.pause(0.8)
        assert (report.workers["w0"].abandoned, report.workers["w0"].residual) == (2, None)
        assert (report.workers["w1"].abandoned, report.workers["w1"].residual) == (0, 0)
        assert made.worker(0).state is WorkerState.QUARANTINED
        await made.resume()
        await made.until(lambda: good.running == 2)
        hole.heal()
        hole.release()
        await made.until(lambda: made.worker(0).state is WorkerState.ACTIVE)


async def test_an_engine_that_died_does_not_hold_the_pause() -> None:
    """A dead engine's requests ended with its connections: the pause is clean, and quick."""  # P8 P12
    async with (
        FakeSGLang(weight_version="0") as dead,
        FakeSGLang(weight_version="0") as good,
        stage(dead, good, pushed=4) as made,
    ):
        await made.until(lambda: dead.running == 2 and good.running == 2)
        await dead.kill()
        report = await made.pause(1.0)
        assert report.clean
        assert (made.samples("aborted"), made.groups("aborted")) == (4, 4)


async def test_a_request_whose_connection_was_lost_is_stopped_too() -> None:
    """What an engine runs on after its connection broke is ours still: the pause aborts it, and is clean."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.release(fate=Reset())
        await engine.wait_requests(2)
        assert engine.running == 2
        report = await made.pause(1.0)
        assert report.clean
        assert engine.running == 0
        assert report.workers["w0"].residual == 0


async def test_what_runs_on_unheard_at_an_idle_worker_is_stopped_too() -> None:
    """The same where the sample has moved on to another worker, so that this one runs nothing we wait for."""  # P9
    async with (
        FakeSGLang(weight_version="0") as lossy,
        FakeSGLang(weight_version="0") as good,
        stage(lossy, good, pushed=1) as made,
    ):
        await made.until(lambda: lossy.running + good.running == 1)
        first, other = (lossy, good) if lossy.running else (good, lossy)
        first.release(fate=Reset())
        await other.wait_running(1)
        report = await made.pause(1.0)
        assert report.clean
        assert (first.running, other.running) == (0, 0)


async def test_an_engine_that_dies_during_the_pause() -> None:
    """Killed between abort and answer, its requests end, and count."""  # P8 P12
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2) as made:
        engine.lose_aborts = True
        await engine.wait_running(2)
        pausing = made.start(made.pause(1.0))
        await engine.wait_aborts(1)
        await engine.kill()
        report = await pausing
        assert report.clean
        assert made.samples("aborted") == 2


async def test_a_put_that_blocks_is_taken_back() -> None:
    """A storage that does not return is cancelled at the tasks rung; the finished group is put again."""  # P8 P9
    store = Store()
    store.block = True
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, storage=store) as made:
        await engine.wait_running(1)
        engine.release(tokens=[1, 2])
        await made.until(lambda: store.saving == 1)
        report = await made.pause(0.5)
        assert report.clean
        assert [rung.pending for rung in report.rungs] == [1, 1, 1, 1, 1, 0]
        [group] = made.live_groups()
        assert (group.account, str(group.samples[0].status)) == ("aborted", "COMPLETED")
        store.block = False
        await made.resume()
        batch = await made.take()
        assert batch["groups"][0]["samples"][0]["response_ids"] == [1, 2]
        assert (len(engine.requests), len(made.judge.seen), len(store.saved)) == (1, 1, 1)


async def test_a_put_that_clings_is_named_and_its_group_is_handed_over_once() -> None:
    """A save that swallows its cancellation and ends after all adds no second copy of the group."""  # P1 P8
    store = Store()
    store.block = store.deaf = True
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, storage=store) as made:
        await engine.wait_running(1)
        engine.release()
        await made.until(lambda: store.saving == 1)
        report = await made.pause(0.5)
        assert [left.worker for left in report.abandoned] == [None]
        await made.resume()
        await made.until(lambda: store.saving == 2)
        store.go_on.set()
        await made.until(lambda: len(store.saved) == 2 and made.groups("ready") == 1)
        assert made.groups("admitted") == 1


@pytest.mark.parametrize("deadline_s", [0.05, 0.2, 0.5, 1.0])
async def test_everything_at_once_by_the_deadline(deadline_s: float) -> None:
    """Lost aborts, a black hole, a hung judge and a blocked put together: back in time, with nothing lost."""  # P8 P10
    store = Store()
    async with (
        FakeSGLang(weight_version="0") as lossy,
        FakeSGLang(weight_version="0") as hole,
        stage(lossy, hole, pushed=8, storage=store, trainer={"train_batch_size": 8}) as made,
    ):
        judge: Judge = made.judge
        await made.until(lambda: lossy.running == 4 and hole.running == 4)
        lossy.lose_aborts = True
        hole.script("/abort_request", Hang(), times=None)
        hole.script("/v1/loads", Hang(), times=None)
        store.block = True
        lossy.release(lossy.requests[0])
        await made.until(lambda: store.saving == 1)
        judge.hold = True
        lossy.release(lossy.requests[1])
        await made.until(lambda: judge.held == 1)
        report = await made.pause(deadline_s)
        assert len([left for left in report.abandoned if left.worker is not None]) == 6
        assert made.groups("aborted") == 8
        assert made.groups("in_flight") == 0
        hole.heal()
        lossy.lose_aborts = False


async def test_requests_of_other_users_of_an_engine_are_left_alone() -> None:
    """On a shared engine aborts go by id, one per request; its count means nothing to us, and is null."""  # P15
    async with FakeSGLang(weight_version="0") as engine:
        shared = {"url": engine.url, "exclusive": False}
        foreign = engine.submit("somebody", {"input_ids": [1]}, {})
        async with stage(shared, pushed=3) as made:
            await engine.wait_running(4)
            report = await made.pause()
            assert report.clean
            assert engine.running == 1
            assert foreign.state == "running"
            assert sorted(abort["rid"] for abort in engine.aborts) == sorted(call.rid for call in engine.requests[1:])
            assert not any(abort.get("abort_all") for abort in engine.aborts)
            assert report.workers["w0"].residual is None
        engine.release()


async def test_by_id_the_second_abort_also_closes_the_connection() -> None:
    """A request that an abort by id missed is not waited for: its connection goes with the second one."""  # P9
    async with FakeSGLang(weight_version="0", handler_cancellation=True) as engine:
        shared = {"url": engine.url, "exclusive": False}
        async with stage(shared, pushed=1) as made:
            engine.lose_aborts = True
            await engine.wait_running(1)
            loop = asyncio.get_running_loop()
            started = loop.time()
            report = await made.pause(5.0)
            assert loop.time() - started < 5.0
            assert report.workers["w0"].cancelled == 1
            await engine.wait_idle()
            engine.lose_aborts = False
            engine.answer = lambda _: Reply(tokens=1)
