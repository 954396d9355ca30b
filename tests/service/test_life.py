"""The life of a service: start, ready, stop, each at any moment and more than once."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartTimeout
from tests.support.fake_sglang import FakeSGLang, Hang, Reply, Status
from tests.support.judges import Judge
from tests.support.stage import lines, make_config, stage
from tests.support.stores import Store


async def test_before_its_start_every_call_says_so() -> None:
    """A service that was not started refuses as `starting`, keeps nothing, and can be stopped."""
    service = RolloutService(make_config("http://127.0.0.1:9"))
    for call in (service.pause(), service.resume(), service.take_batch(0, 1, 0.0), service.put_prompts("t", lines(1))):
        with pytest.raises(NotNow) as refused:
            await call
        assert refused.value.type == "starting"
    assert len(service.prepared.sources["t"]) == 0  # type: ignore[arg-type]
    await service.stop()
    await service.stop()


async def test_starting_twice_is_starting_once() -> None:
    """The second start changes nothing."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        parts = made.service.parts
        await made.service.start()
        assert made.service.parts is parts
        assert made.service.state == "running"


async def test_engines_that_load_are_waited_for() -> None:
    """The gate stays closed until the last engine has answered; then the run begins."""
    async with (
        FakeSGLang(weight_version="0") as quick,
        FakeSGLang(weight_version="0") as slow,
        stage(quick, slow, pushed=4, ready=False) as made,
    ):
        slow.script("/model_info", Status(503), times=2)
        waiting = made.start(made.service.ready())
        await slow.wait_hits("/model_info", 2)
        assert (made.service.state, made.parts.gate.is_open("train"), waiting.done()) == ("starting", False, False)
        assert not quick.requests
        await waiting
        await made.until(lambda: quick.running == 2 and slow.running == 2)


async def test_engines_that_do_not_come_are_named() -> None:
    """`ready` raises at `start_timeout_s` with the silent workers, and they alone."""
    async with (
        FakeSGLang(weight_version="0") as good,
        FakeSGLang(weight_version="0") as silent,
        stage(good, silent, ready=False, start_timeout_s=0.4) as made,
    ):
        silent.script("/model_info", Hang(), times=None)
        with pytest.raises(StartTimeout, match=f"w1 at {silent.url}") as late:
            await made.service.ready()
        assert "w0" not in str(late.value)
        silent.heal()


async def test_stopping_aborts_what_runs_and_ends_every_wait() -> None:
    """A stop drains the engines, and a take that waits is told at once."""  # P23
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=4) as made:
        await engine.wait_running(4)
        waiting = made.start(made.service.take_batch(0, 1, 600.0))
        await asyncio.sleep(0)
        await made.service.stop()
        assert engine.aborts == [{"abort_all": True}]
        assert not engine.live
        with pytest.raises(NotNow) as refused:
            await waiting
        assert "stopping" in refused.value.message
        with pytest.raises(NotNow):
            await made.service.take_batch(0, 1, 1.0)


async def test_two_stops_both_return_when_it_has_stopped() -> None:
    """Whoever stops a service that is stopping waits for it as well."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        first = made.start(made.service.stop())
        await engine.wait_aborts(1)
        second = made.start(made.service.stop())
        await engine.wait_aborts(2)
        assert not second.done()
        engine.lose_aborts = False
        await first
        await second
        assert not made.parts.tasks.live


async def test_a_stop_that_is_cancelled_still_cleans_up() -> None:
    """Cancelling the caller of `stop` propagates once the service has stopped."""  # P14
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        stopping = made.start(made.service.stop())
        await engine.wait_aborts(1)
        stopping.cancel()
        await engine.wait_aborts(2)
        engine.lose_aborts = False
        await asyncio.wait({stopping})
        assert stopping.cancelled()
        assert not made.parts.tasks.live
        await made.service.stop()


async def test_a_resume_that_waits_does_not_open_a_service_that_stops() -> None:
    """A stop during a pause wins over the resume that waits for its report."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        pausing = made.start(made.service.pause())
        await engine.wait_aborts(1)
        resuming = made.start(made.service.resume())
        await engine.wait_aborts(2)
        stopping = made.start(made.service.stop())
        await engine.wait_aborts(3)
        engine.lose_aborts = False
        await pausing
        with pytest.raises(NotNow) as refused:
            await resuming
        assert refused.value.type == "stopping"
        await stopping
        assert len(engine.requests) == 1


async def test_stopping_with_judges_and_puts_under_way() -> None:
    """A hung judge and a blocked put do not outlive the service."""
    store = Store()
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=2, storage=store) as made:
        judge: Judge = made.judge
        await engine.wait_running(2)
        store.block = True
        engine.release(engine.requests[0])
        await made.until(lambda: store.saving == 1)
        judge.hold = True
        engine.release(engine.requests[1])
        await made.until(lambda: judge.held == 1)
        await made.service.stop()
        assert store.closed
        assert not made.parts.tasks.live


async def test_a_put_that_fails_is_made_again() -> None:
    """A storage that failed once costs a little time and no sample; it is reported."""  # P1
    store = Store()
    store.fail = 1
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, storage=store) as made:
        made.may_die = True
        engine.answer = lambda _: Reply(tokens=1)
        engine.release(tokens=1)
        assert len((await made.take())["groups"]) == 1
        assert (store.saving, len(engine.requests), len(made.judge.seen)) == (2, 1, 1)
