"""Quarantine: who goes in, what the worker gets meanwhile, and every way back."""

from __future__ import annotations

from rollout_svc.events import RequestAborted
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import FakeSGLang, Hang, Status
from tests.support.stage import stage


async def test_what_no_abort_stops_is_cancelled_named_and_quarantined() -> None:
    """Requests that survive every abort are cancelled and named, and their worker gets no traffic."""  # P8 P9
    async with (
        FakeSGLang(weight_version="0") as deaf,
        FakeSGLang(weight_version="0") as good,
        stage(deaf, good, pushed=4) as made,
    ):
        deaf.lose_aborts = True
        await made.until(lambda: deaf.running == 2 and good.running == 2)
        report = await made.pause(0.6)
        assert not report.clean
        assert [rung.name for rung in report.rungs] == ["gate", "abort", "judges", "http", "report"]
        assert report.workers["w0"].as_json() == {
            "in_flight": 2,
            "answered": 0,
            "late": 0,
            "cancelled": 2,
            "abandoned": 2,
            "residual": 2,
        }
        assert report.workers["w1"].answered == 2
        assert {(left.worker, left.sample_id is not None) for left in report.abandoned} == {("w0", True)}
        assert len({left.sample_id for left in report.abandoned}) == 2
        assert made.worker(0).state is WorkerState.QUARANTINED
        assert made.samples("aborted") == 4  # nothing is lost
        assert {event.reason for event in made.of(RequestAborted)} == {"pause"}
        await made.resume()
        await made.until(lambda: good.running == 2)  # its share of the target; the others wait for a worker
        assert (len(good.requests), len(deaf.requests)) == (4, 2)
        deaf.release()


async def test_a_quarantined_worker_does_not_slow_the_next_pause() -> None:
    """What one pause abandoned is counted once more by the next, named, and not waited for."""  # P9
    async with (
        FakeSGLang(weight_version="0") as deaf,
        FakeSGLang(weight_version="0") as good,
        stage(deaf, good, pushed=4) as made,
    ):
        deaf.lose_aborts = True
        await made.until(lambda: deaf.running == 2 and good.running == 2)
        await made.pause(0.4)
        await made.resume()
        await made.until(lambda: good.running == 2)
        quarantine = made.worker(0).quarantine
        report = await made.pause(30.0)
        assert report.elapsed_s < 2.0
        assert made.worker(0).quarantine == quarantine  # or frequent pauses would put its canary off for ever
        assert [left.worker for left in report.abandoned] == ["w0", "w0"]
        assert report.workers["w0"].residual == 2
        deaf.release()


async def test_a_quarantined_worker_comes_back_when_its_count_is_zero() -> None:
    """Once the engine is idle by its own count it is in traffic again."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        assert not (await made.pause(0.5)).clean
        await made.resume()
        assert made.parts.producer.waiting in {"gate_closed", "no_worker"}
        engine.lose_aborts = False
        engine.release()
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE)
        await engine.wait_requests(2)


async def test_a_quarantined_worker_comes_back_by_a_canary() -> None:
    """An engine whose count never falls is tried after `quarantine_s` with one token."""  # P9
    pause = {"quarantine_s": 0.3}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, pause=pause) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        assert not (await made.pause(0.5)).clean
        await made.resume()
        await engine.wait_requests(2)
        canary = engine.requests[1]
        assert (canary.prompt_ids, canary.max_new_tokens) == ([0], 1)
        assert made.worker().state is WorkerState.QUARANTINED
        engine.release(canary, finish="length")
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE)
        await engine.wait_requests(3)
        engine.lose_aborts = False


async def test_an_engine_that_is_being_tried_is_not_said_to_be_idle() -> None:
    """A canary that has not arrived is in no count: until it is over nobody knows what runs there."""  # P9
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.script("/generate", Hang())
        trial = made.start(made.parts.supervisor._canary.sing(made.worker()))
        await engine.wait_hits("/generate", 1)
        assert (await made.pause(1.0)).workers["w0"].residual is None
        engine.heal("/generate")
        await engine.wait_running(1)
        engine.release(finish="length")
        assert await trial
        await made.resume()
        assert (await made.pause(1.0)).workers["w0"].residual == 0


async def test_a_canary_that_fails_keeps_the_worker_out() -> None:
    """No traffic goes to an engine whose canary fails; a later one that works brings it back."""  # P9
    pause = {"quarantine_s": 0.0}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1, pause=pause) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        await made.pause(0.4)
        await made.resume()
        await engine.wait_requests(2)
        engine.release(engine.requests[1], fate=Status(500))
        await engine.wait_requests(3)
        assert made.worker().state is WorkerState.QUARANTINED
        engine.lose_aborts = False
        engine.release(engine.requests[2], finish="length")
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE)
