"""Corners of the pause protocol: what a pause leaves behind, and what comes while an attempt is under way."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import Conflict
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang, Hang, Status
from tests.support.stage import stage

THAW = "/continue_generation"
TWO = {"train_batch_size": 2}


async def test_a_stronger_pause_ends_what_a_later_weaker_one_froze() -> None:
    """A lane that was closed by `keep` is aborted when asked, although another lane had been aborted before."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        evaluating = made.start(made.evaluate(1))
        await engine.wait_running(2)
        await made.pause(2.0, lanes=("train",))
        await made.pause(2.0, mode="keep")
        assert (engine.paused, engine.running) == ("in_place", 1)
        report = await made.pause(2.0, mode="abort")
        assert (report.mode, report.clean, engine.running, engine.paused) == ("abort", True, 0, None)
        assert made.parts.gate.epoch("eval") == 1
        await made.resume()
        await engine.wait_running(2)
        engine.release(tokens=[1])
        await evaluating


async def test_a_lane_that_joins_a_wait_late_may_finish_too() -> None:
    """The time to finish begins anew with a lane that joins, and ends with its epoch raised."""  # P3
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        evaluating = made.start(made.evaluate(2))
        await engine.wait_running(3)
        train, whole, cut = engine.calls("running")
        first = made.start(made.pause(4.0, mode="wait", lanes=("train",)))
        await engine.wait_aborts(1)
        second = made.start(made.pause(1.0, mode="wait", lanes=("eval",)))
        await made.until(lambda: not made.parts.gate.is_open("eval"))
        assert made.parts.gate.epoch("eval") == 0
        engine.release(whole, tokens=[1])
        await made.until(lambda: made.parts.evaluations.ledger.groups("ready") == 1)
        engine.lose_aborts = False
        report = await second
        assert await first is report
        assert report.clean
        assert (made.parts.gate.epoch("eval"), train.state, cut.state) == (1, "over", "over")
        await made.resume()
        await engine.wait_running(2)
        engine.release(tokens=[2])
        first_answer, second_answer = await evaluating
        assert sorted((first_answer["response_ids"][-1], second_answer["response_ids"][-1])) == [1, 2]


async def test_what_is_asked_during_an_attempt_is_done_after_it() -> None:
    """A thaw that hangs over the end of the wait is given up there, and the aborts are sent."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(2.0, mode="keep")
        engine.script(THAW, Hang())
        report = await made.pause(2.0, mode="wait")
        assert (report.clean, engine.running, engine.paused) == (True, 0, None)
        assert len(engine.aborts) >= 1
        assert report.workers["w0"].answered == 1


async def test_no_cache_outlives_an_update_on_a_worker_that_may_still_be_frozen() -> None:
    """A freeze that was ended by a stronger pause, but not confirmed to be over, keeps no cache."""  # P25
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(2.0, mode="keep")
        engine.script(THAW, Status(500), times=None)
        pausing = made.start(made.pause(2.0, mode="abort"))
        await engine.wait_aborts(1)
        engine.release(tokens=[1])
        assert (await pausing).clean
        assert made.worker().freeze is not None
        assert (await made.service.update_weights(1, {"kind": "disk", "path": "v1"}))["workers"]["w0"]["ok"]
        assert engine.updates[-1][1]["flush_cache"] is True
        engine.heal(THAW)
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")


async def test_a_slow_thaw_costs_requests_nothing() -> None:
    """The limit on a request counts again when its engine confirmed that it goes on, not when it was told to."""
    async with (
        FakeSGLang(weight_version="0") as slow,
        FakeSGLang(weight_version="0") as quick,
        stage(slow, quick, pushed=2, trainer=TWO, request_timeout_s=0.6) as made,
    ):
        await slow.wait_running(1)
        await quick.wait_running(1)
        await made.pause(5.0, mode="keep")
        loop = asyncio.get_running_loop()
        passed = loop.create_future()
        loop.call_later(0.8, passed.set_result, None)
        await passed
        slow.script(THAW, Hang())
        await made.resume()
        await made.until(lambda: made.worker(1).freeze is None)
        await slow.wait_hits(THAW, slow.count(THAW) or 1)
        quick.release(tokens=[1])
        await made.until(lambda: made.groups("ready") == 1)
        assert made.worker(0).calls
        slow.heal(THAW)
        await slow.until(lambda: slow.paused is None, "thawed")
        slow.release(tokens=[1])
        assert len((await made.take(groups=2))["groups"]) == 2
        assert made.parts.tally.failed["request_timeout"] == 0


async def test_a_worker_that_is_removed_does_not_come_back_as_a_quarantined_one() -> None:
    """What a worker that drains still holds when it does not go on is given up, and the worker leaves."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause(2.0, mode="keep")
        worker = made.worker()
        await made.service.remove_worker("w0")
        worker.put_in_quarantine("residual", "it does not go on after a freeze")
        assert worker.state is WorkerState.DRAINING
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")
        engine.release(tokens=[1])
        await made.until(lambda: not made.parts.pool.workers)


async def test_stopping_does_not_wait_for_somebody_elses_deadline() -> None:
    """A stop shortens a pause that is under way to the service's own deadline."""  # P8
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        pausing = made.start(made.pause(3600.0, mode="wait"))
        await made.until(lambda: made.service.state == "pausing")
        await made.service.stop()
        assert (await pausing).mode == "abort"


async def test_an_engine_that_refuses_one_abort_is_told_the_others() -> None:
    """One request whose abort fails keeps no other from being aborted in the same round."""  # P12
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2, trainer=TWO) as made:
        await engine.wait_running(2)
        refused, taken = engine.calls("running")
        engine.script("/abort_request", Status(500))
        assert not await made.parts.pool.abort(made.worker(), [refused.rid, taken.rid])
        assert (refused.state, taken.state) == ("running", "over")


async def test_a_cache_that_was_kept_is_not_said_to_be_dropped() -> None:
    """`kv: drop` over what is frozen with its cache is refused; the other way round it is the same pause."""  # P25
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        kept = await made.pause(2.0, mode="keep")
        with pytest.raises(Conflict, match="cache"):
            await made.service.pause(mode="keep", kv="drop")
        assert await made.pause(2.0, mode="keep") is kept
        await made.resume()
        await engine.until(lambda: engine.paused is None, "thawed")
        dropped = await made.pause(2.0, mode="keep", kv="drop")
        assert await made.pause(2.0, mode="keep") is dropped
        await made.resume()


async def test_the_oldest_call_is_watched_whoever_goes_on_first() -> None:
    """The one timer is for the call whose time is up first, also where its worker went on after another."""
    async with (
        FakeSGLang(weight_version="0") as slow,
        FakeSGLang(weight_version="0") as quick,
        stage(slow, quick, pushed=1, trainer=TWO) as made,
    ):
        await slow.wait_running(1)
        loop = asyncio.get_running_loop()
        passed = loop.create_future()
        loop.call_later(0.5, passed.set_result, None)
        await passed
        await made.push(1, first=1)
        await quick.wait_running(1)
        await made.pause(5.0, mode="keep")
        slow.script(THAW, Hang())
        await made.resume()
        await made.until(lambda: made.worker(1).freeze is None)
        slow.heal(THAW)
        await made.until(lambda: made.worker(0).freeze is None)
        [old], [young] = (list(worker.calls.values()) for worker in made.parts.pool.workers.values())
        assert old.since + old.held_s < young.since + young.held_s
        timer = made.parts.pool._overdue._timer
        assert timer is not None
        assert timer.when() == old.since + old.held_s + made.service.config.request_timeout_s
