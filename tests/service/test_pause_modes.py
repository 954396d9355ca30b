"""Modes `wait` and `keep`, over the real service: what may finish, what is frozen, and what joins make of both."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import BadRequest
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang, Hang, Status
from tests.support.judges import Judge
from tests.support.loops import ToolUser
from tests.support.stage import stage

FREEZE = "/pause_generation"
THAW = "/continue_generation"
TWO = {"train_batch_size": 2}


def rungs(report: object) -> list[str]:
    """Name the rungs a report lists."""
    return [rung.name for rung in report.rungs]  # type: ignore[attr-defined]


# -- wait ----------------------------------------------------------------------------------------------------


async def test_waiting_lets_what_runs_finish_and_count() -> None:
    """In `wait` running requests end by themselves, are judged behind the closed gate, and nothing is aborted."""
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=3, trainer=TWO) as made,
    ):
        await engine.wait_running(2)
        pausing = made.start(made.pause(20.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        engine.release(tokens=[1, 2])
        report = await pausing
        assert (report.mode, report.clean, rungs(report)) == ("wait", True, ["gate", "wait", "report"])
        assert (report.workers["w0"].answered, report.workers["w0"].late) == (2, 0)
        assert (made.groups("ready"), made.groups("in_flight"), engine.aborts) == (2, 0, [])
        assert len(engine.requests) == 2
        assert made.parts.gate.epoch("train") == 0


async def test_waiting_ends_at_half_of_the_time() -> None:
    """What has not finished by half of the deadline is aborted, and from then on whole answers are late."""  # P3 P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause(1.0, mode="wait")
        assert report.clean
        assert rungs(report) == ["gate", "wait", "abort", "report"]
        assert 0.5 <= report.rungs[2].at_s < 0.8
        assert len(engine.aborts) == 1
        assert made.parts.gate.epoch("train") == 1
        assert made.samples("aborted") == 1


async def test_a_late_answer_after_the_wait_is_aborted() -> None:
    """The right to finish ends with the wait: what comes whole after it is ABORTED, and judged after resume."""  # P3
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.pause(4.0, mode="wait"))
        await engine.wait_aborts(1)
        engine.release(tokens=[5])
        report = await pausing
        assert (report.clean, report.workers["w0"].late) == (True, 1)
        [sample] = made.live_groups()[0].samples
        assert (str(sample.status), sample.resume_at) == ("ABORTED", "judge")


async def test_nothing_starts_while_a_pause_waits() -> None:
    """A second turn of an agent is a new request: it parks, and goes on after resume."""  # P9
    path = {"path": "tests.support.loops:ToolUser"}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, agent=path) as made:
        agent: ToolUser = made.agent
        agent.go_on.set()
        await engine.wait_running(1)
        pausing = made.start(made.pause(20.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        engine.release(tokens=[1])
        report = await pausing
        assert (report.clean, len(report.parked), len(engine.requests)) == (True, 1, 1)
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[2])
        assert (await made.take())["groups"]


async def test_a_judge_that_hangs_holds_a_waiting_pause_until_its_rung() -> None:
    """Judges finish in `wait` as requests do, and no longer: the ladder cancels the one that hangs."""  # P13
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        judge: Judge = made.judge
        judge.hold = True
        await engine.wait_running(1)
        pausing = made.start(made.pause(1.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        engine.release(tokens=[1])
        report = await pausing
        assert report.clean
        assert rungs(report) == ["gate", "wait", "abort", "judges", "report"]
        assert (len(judge.seen), len(judge.cancelled), made.samples("aborted")) == (1, 1, 1)


async def test_an_abort_joins_a_wait() -> None:
    """The stronger mode wins at once, with the ticket of the pause it joins."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        waiting = made.start(made.pause(30.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        report = await made.pause(5.0)
        assert await waiting is report
        assert (report.mode, report.ticket, report.clean) == ("abort", 1, True)
        assert report.elapsed_s < 5.0
        assert made.parts.gate.epoch("train") == 1


# -- keep ----------------------------------------------------------------------------------------------------


async def test_keeping_freezes_and_goes_on_where_it_was() -> None:
    """In `keep` the engine confirms a freeze, nothing is lost, and the same request ends after resume."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause(5.0, mode="keep")
        assert (report.mode, report.clean, rungs(report)) == ("keep", True, ["gate", "freeze", "report"])
        assert (engine.paused, engine.aborts) == ("in_place", [])
        tally = report.workers["w0"]
        assert (tally.in_flight, tally.answered, tally.cancelled, tally.residual) == (1, 0, 0, 0)
        assert report.ledger["samples"]["in_flight"] == 1
        assert made.parts.gate.epoch("train") == 0
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1, 2])
        [record] = (await made.take())["groups"][0]["samples"]
        assert (record["response_ids"], record["finish_reason"]) == ([1, 2], "stop")
        assert len(engine.requests) == 1


async def test_dropping_the_cache_retracts() -> None:
    """`kv: drop` has the frozen requests made again from their tokens."""  # P25
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause(5.0, mode="keep", kv="drop")
        assert (report.clean, engine.paused, engine.waiting) == (True, "retract", 1)
        await made.resume()
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]


async def test_weights_change_under_frozen_requests() -> None:
    """A request that was frozen over an update has two spans, each under the version the engine reported."""  # P7 P24
    async with (
        FakeSGLang(weight_version="0", report_spans=True) as engine,
        stage(engine, pushed=1) as made,
    ):
        await engine.wait_running(1)
        [call] = engine.calls("running")
        engine.advance(call, 2)
        await made.pause(5.0, mode="keep")
        updated = await made.service.update_weights(1, {"kind": "disk", "path": "v1"})
        assert updated["workers"]["w0"]["ok"]
        assert engine.updates[-1][1]["flush_cache"] is False
        await made.resume(weight_version=1)
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1, 2, 3, 4])
        [record] = (await made.take(step=1))["groups"][0]["samples"]
        spans = [(span["version"], span["start"], span["end"]) for span in record["weight_versions"]]
        assert spans == [(0, 0, 2), (1, 2, 4)]


async def test_a_stronger_pause_leaves_weights_on_their_way_alone() -> None:
    """What is frozen does not go on while its engine loads: the abort over it takes effect after the update."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(5.0, mode="keep")
        engine.script("/update_weights_from_disk", Hang())
        updating = made.start(made.service.update_weights(1, {"kind": "disk", "path": "v1"}))
        await engine.wait_hits("/update_weights_from_disk", 1)
        before = engine.count(THAW)
        pausing = made.start(made.pause(10.0, mode="abort"))
        await engine.wait_aborts(2)
        assert (engine.count(THAW), engine.paused) == (before, "in_place")
        engine.heal("/update_weights_from_disk")
        assert (await updating)["workers"]["w0"]["ok"]
        report = await pausing
        assert (report.clean, engine.running, engine.paused) == (True, 0, None)


async def test_an_answer_under_way_at_the_update_is_no_odd_one() -> None:
    """What an engine had made before its freeze may land after the update, under the version of its dispatch."""  # P7
    async with FakeSGLang(weight_version="0", report_spans=True) as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        [call] = engine.calls("running")
        await made.pause(5.0, mode="keep")
        worker = made.worker()
        worker.version = 1  # as after an update that this answer crossed
        engine.release(call, tokens=[1, 2])
        await made.until(lambda: not worker.calls)
        assert worker.state is WorkerState.ACTIVE
        worker.version = 0
        await made.resume()
        assert (await made.take())["groups"]


async def test_time_stands_still_for_frozen_requests() -> None:
    """The limit on a request does not count the time it was frozen, and counts on when it goes on."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, request_timeout_s=0.6) as made:
        await engine.wait_running(1)
        await made.pause(5.0, mode="keep")
        loop = asyncio.get_running_loop()
        passed = loop.create_future()
        loop.call_later(0.8, passed.set_result, None)
        await passed
        assert made.worker().calls
        await made.resume()
        await engine.wait_requests(2)  # it was given up 0.6 s of its own later, and tried again
        assert made.parts.tally.failed["request_timeout"] == 1


async def test_a_worker_that_does_not_confirm_is_aborted() -> None:
    """An engine that refuses to freeze climbs the abort ladder alone; the others stay frozen."""  # P12
    async with (
        FakeSGLang(weight_version="0") as good,
        FakeSGLang(weight_version="0") as bad,
        stage(good, bad, pushed=2, trainer=TWO) as made,
    ):
        await good.wait_running(1)
        await bad.wait_running(1)
        bad.script(FREEZE, Status(500), times=None)
        report = await made.pause(2.0, mode="keep")
        assert report.clean
        assert rungs(report)[:3] == ["gate", "freeze", "abort"]
        assert (good.paused, len(good.aborts), good.running) == ("in_place", 0, 1)
        assert (bad.paused, len(bad.aborts), bad.running) == (None, 1, 0)
        assert made.parts.gate.epoch("train") == 0
        assert (made.samples("in_flight"), made.samples("aborted")) == (1, 1)
        await made.resume()
        await bad.wait_running(1)
        for engine in (good, bad):
            await engine.until(lambda: engine.paused is None, "thawed")  # noqa: B023
            engine.release(tokens=[1, 2, 3, 4])
        assert len((await made.take(groups=2))["groups"]) == 2


async def test_a_freeze_that_was_never_answered_is_undone() -> None:
    """An engine that froze and did not say so is aborted and told to go on, so that the abort takes effect."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.script(FREEZE, Hang(), times=None)
        engine.pause("in_place")
        report = await made.pause(2.0, mode="keep")
        assert report.clean
        assert (engine.paused, engine.running) == (None, 0)
        assert engine.count(THAW) >= 1


async def test_an_abort_ends_what_is_frozen() -> None:
    """A stronger pause sends the aborts and then lets the engine go on so that they take effect: same ticket."""  # P9
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=2, trainer=TWO) as made,
    ):
        await engine.wait_running(2)
        kept = await made.pause(5.0, mode="keep")
        report = await made.pause(5.0, mode="abort")
        assert (kept.ticket, report.ticket, report.mode, report.clean) == (1, 1, "abort", True)
        assert (engine.running, engine.paused, made.samples("in_flight")) == (0, None, 0)
        assert made.parts.gate.epoch("train") == 1


async def test_a_wait_lets_what_is_frozen_finish() -> None:
    """`wait` over `keep`: the engine goes on, and what ends in half of the time counts."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(5.0, mode="keep")
        pausing = made.start(made.pause(20.0, mode="wait"))
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1])
        report = await pausing
        assert (report.clean, report.mode, engine.aborts) == (True, "wait", [])
        assert made.groups("ready") == 1


async def test_a_weaker_pause_changes_nothing() -> None:
    """`keep` where the stage is paused by `abort` gets that pause's report; nothing is frozen."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause()
        assert await made.pause(mode="keep") is report
        assert engine.count(FREEZE) == 0


async def test_judges_go_on_in_keep_and_new_ones_wait() -> None:
    """A judge that runs may finish behind the gate; one that would start waits for resume, and nothing waits for it."""
    async with (
        FakeSGLang(weight_version="0") as engine,
        stage(engine, pushed=2, trainer=TWO) as made,
    ):
        judge: Judge = made.judge
        judge.hold = True
        await engine.wait_running(2)
        first, second = engine.calls("running")
        engine.release(first, tokens=[1])
        await made.until(lambda: judge.held == 1)
        report = await made.pause(20.0, mode="keep")
        assert (report.clean, report.elapsed_s < 5.0) == (True, True)
        engine.release(second, tokens=[2])  # it landed all the same
        await made.until(lambda: not made.worker().calls)
        assert len(judge.seen) == 1
        judge.release()
        await made.until(lambda: made.groups("ready") == 1)
        await made.resume()
        assert len((await made.take(groups=2))["groups"]) == 2
        assert len(judge.seen) == 2


async def test_keep_is_refused_where_no_engine_can_do_it() -> None:
    """A mode that nobody there can do is refused by name, before anything is stopped."""  # P35
    async with FakeSGLang(weight_version="0") as engine:
        shared = {"url": engine.url, "exclusive": False}
        async with stage(shared, pushed=1) as made:
            await engine.wait_running(1)
            with pytest.raises(BadRequest, match="w0"):
                await made.service.pause(mode="keep")
            assert made.service.state == "running"


async def test_stopping_ends_what_is_frozen() -> None:
    """A service that stops leaves no engine frozen, and no request on it."""
    async with FakeSGLang(weight_version="0") as engine:
        async with stage(engine, pushed=1) as made:
            await engine.wait_running(1)
            await made.pause(5.0, mode="keep")
        assert (engine.paused, engine.running) == (None, 0)


async def test_an_engine_found_frozen_goes_on() -> None:
    """A service that died may have left its engines frozen: the next one lets them go on before it sends traffic."""
    async with FakeSGLang(weight_version="0") as engine:
        engine.pause("in_place")
        async with stage(engine, pushed=1):
            await engine.wait_running(1)


async def test_an_engine_that_may_be_frozen_gets_no_traffic() -> None:
    """One that does not take the command to go on is kept out: what is sent to a frozen engine waits for ever."""  # P9
    async with FakeSGLang(weight_version="0") as engine:
        engine.pause("in_place")
        engine.script(THAW, Status(503), times=None)
        async with stage(engine, pushed=1, ready=False) as made:
            await made.until(lambda: made.worker().state is WorkerState.QUARANTINED)
            assert "frozen" in made.worker().reason
            assert not engine.blocked
            engine.heal(THAW)
            await made.service.ready()
            await engine.wait_running(1)


async def test_an_engine_that_does_not_go_on_loses_its_requests() -> None:
    """After resume a worker that stays frozen is given up: its requests move, and it is kept from traffic."""  # P19
    async with (
        FakeSGLang(weight_version="0") as good,
        FakeSGLang(weight_version="0") as bad,
        stage(good, bad, pushed=2, trainer=TWO) as made,
    ):
        await good.wait_running(1)
        await bad.wait_running(1)
        await made.pause(2.0, mode="keep")
        await bad.kill()
        await made.resume()
        await good.wait_running(2)
        good.release(tokens=[1])
        assert len((await made.take(groups=2))["groups"]) == 2


async def test_an_idle_worker_that_may_be_frozen_gets_traffic_again() -> None:
    """A freeze that was never confirmed, with nothing left to abort, is undone at resume at the latest."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.script(FREEZE, Hang(), times=None)
        engine.script(THAW, Status(500), times=None)
        engine.pause("in_place")
        pausing = made.start(made.pause(1.0, mode="keep"))
        await engine.wait_hits(FREEZE, 1)
        engine.release(tokens=[1])  # an answer that was on its way
        await pausing
        engine.heal(THAW)
        await made.resume()
        await made.push(1, first=5)
        await engine.wait_running(1)
