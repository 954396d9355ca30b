"""An engine that reports no weight version, stops nothing that waits, and counts nothing: LMDeploy's kind."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.errors import BadRequest, NotNow
from rollout_svc.events import EngineDoubted, SampleFailed
from rollout_svc.workers.worker import WorkerState
from tests.support.face import reset_connection
from tests.support.fake_lmdeploy import Call, Cut, FakeLMDeploy, Raw, Reply, Reset, Status
from tests.support.fake_sglang import FakeSGLang
from tests.support.routing import TINY
from tests.support.stage import Stage, stage

EXTERNAL = {"kind": "external"}


def answered(_: Call) -> Reply:
    """Answer everything at once."""
    return Reply(tokens=[7, 2])


def spans(batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The weight versions of every sample of a batch."""
    return [sample["weight_versions"] for group in batch["groups"] for sample in group["samples"]]


def stamped(version: int | None, start: int, end: int) -> dict[str, Any]:
    """A span nobody but us vouches for."""
    return {"version": version, "start": start, "end": end, "confirmed": False}


async def updated(made: Stage, engine: FakeLMDeploy, version: int, **source: Any) -> dict[str, Any]:
    """Pause, have the trainer put its weights in, tell the service, resume."""
    await made.pause()
    engine.load(version)
    answer = await made.service.update_weights(version, EXTERNAL | source)
    await made.resume()
    return answer


# -- weights -------------------------------------------------------------------------------------------------


async def test_tokens_are_stamped_at_dispatch() -> None:
    """What the engine does not say is what it was dispatched under, marked as unconfirmed."""  # P7
    async with FakeLMDeploy() as engine, stage(engine) as made:
        engine.answer = answered
        await made.push(2)
        batch = await made.take(groups=2)
        assert spans(batch) == [[stamped(0, 0, 2)]] * 2
        assert {sample["finish_reason"] for group in batch["groups"] for sample in group["samples"]} == {"stop"}
        answer = await updated(made, engine, 1)
        assert answer == {"version": 1, "workers": {"w0": {"ok": True, "version": 1, "confirmed": False}}}
        await made.push(1, first=2)
        batch = await made.take(step=1)
        assert spans(batch) == [[stamped(1, 0, 2)]]
        assert made.service.status()["weight_version"] == 1


async def test_a_sample_continued_over_an_update_has_two_stamps() -> None:
    """Each segment has the version of its own dispatch, and that is what the engine had."""  # P6 P7
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await updated(made, engine, 1)
        await engine.wait_requests(2)
        first, second = engine.requests
        assert second.prompt_ids == [*first.prompt_ids, 101, 102, 103]
        assert second.max_tokens == first.max_tokens - 3
        engine.release(tokens=[7, 2])
        assert spans(await made.take(step=1)) == [[stamped(0, 0, 3), stamped(1, 3, 5)]]
        assert [[weights for weights, _ in call.made_under] for call in (first, second)] == [[0], [1]]


async def test_tokens_an_update_overlapped_have_no_version() -> None:
    """Nobody knows what such a token was made of, and it is not trained on where staleness is bounded."""  # P2 P7
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.load(1)
        made.worker().version = 1  # as an update leaves it that could not wait for this call
        engine.release(tokens=[7, 2])
        with pytest.raises(NotNow):
            await made.take(step=1, timeout_s=0.2)
        assert made.groups("expired") == 1


async def test_a_disk_update_is_refused_by_name(tmp_path: Any) -> None:
    """It loads nothing from a path: the update fails there, says so, and nobody takes it for updated."""  # P24
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        with pytest.raises(NotNow) as failed:
            await made.service.update_weights(1, {"kind": "disk", "path": str(tmp_path)})
        assert "lmdeploy takes no weights by disk here" in failed.value.detail["workers"]["w0"]["error"]
        assert made.service.status()["weight_version"] == 0


async def test_a_cache_that_nobody_can_drop_is_warned_about_once() -> None:
    """P25: it has no way to be told: whoever runs it has to see to it, and hears so at the first update."""
    async with FakeLMDeploy() as engine, stage(engine) as made:
        await updated(made, engine, 1)
        await updated(made, engine, 2)
        [path] = [doubt.path for doubt in made.of(EngineDoubted) if "without prefix caching" in doubt.message]
        assert path == "workers.0"


# -- restarts ------------------------------------------------------------------------------------------------


async def killed_and_back(made: Stage, engine: FakeLMDeploy) -> None:
    """Kill an engine, let the service notice, and start it again."""
    await engine.kill()
    await made.until(lambda: made.worker().state is WorkerState.DEAD)
    engine.restarts += 1
    await engine.listen()


def answer_canaries(call: Call) -> Reply | None:
    """Make the one token a worker is tried with before it gets traffic again."""
    return Reply(finish="length") if call.prompt_ids == [0] else None


def traffic(engine: FakeLMDeploy) -> list[Call]:
    """Every request but canaries."""
    return [call for call in engine.requests if call.prompt_ids != [0]]


@pytest.mark.parametrize("metrics", [True, False])
async def test_restarted_after_an_update_it_waits_for_the_next(metrics: bool) -> None:
    """It has the weights of its start and cannot say so: no traffic before an update that names it."""  # P19 P24
    trainer = {"max_staleness": 4}
    async with FakeLMDeploy(metrics=metrics) as engine, stage(engine, pushed=1, trainer=trainer) as made:
        await engine.wait_running(1)
        await updated(made, engine, 1)
        await engine.wait_requests(2)
        engine.answer = answer_canaries
        await killed_and_back(made, engine)
        await made.until(lambda: made.worker().state is WorkerState.QUARANTINED)
        assert "unlabelled weights" in made.worker().reason
        assert made.worker().version is None
        with pytest.raises(NotNow):
            await updated(made, engine, 2)  # whoever moved the weights did not say that it got them
        await made.until(lambda: made.worker().state is WorkerState.QUARANTINED)
        assert len(traffic(engine)) == 2
        await updated(made, engine, 2, workers=["w0"])
        await engine.until(lambda: len(traffic(engine)) == 3, "it gets traffic")
        engine.release(tokens=[7, 2])
        assert spans(await made.take(step=2))[0][-1]["version"] == 2


@pytest.mark.parametrize("metrics", [True, False])
async def test_broken_under_load_and_restarted_it_waits_for_the_next(metrics: bool) -> None:
    """Several groups saw it break, so it recovers and was never called dead: what it has is as unknown."""  # P7 P19
    trainer = {"max_staleness": 4}
    async with FakeLMDeploy(metrics=metrics) as engine, stage(engine, pushed=4, trainer=trainer) as made:
        await engine.wait_running(4)
        await updated(made, engine, 1)
        await engine.wait_requests(8)
        engine.answer = answer_canaries
        await engine.kill()
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        engine.restarts += 1
        await engine.listen()
        await made.until(lambda: made.worker().state in (WorkerState.QUARANTINED, WorkerState.ACTIVE))
        assert (made.worker().state, made.worker().version) == (WorkerState.QUARANTINED, None)
        await updated(made, engine, 2, workers=["w0"])
        await engine.until(lambda: len(traffic(engine)) == 12, "it gets traffic")
        engine.release(tokens=[7, 2])
        assert {each[-1]["version"] for each in spans(await made.take(step=2, groups=4))} == {2}


@pytest.mark.parametrize("metrics", [True, False])
async def test_restarted_before_any_update_it_is_let_in(metrics: bool) -> None:
    """No update was made: what it starts with is what it had."""  # P19
    async with FakeLMDeploy(metrics=metrics) as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.answer = answer_canaries
        await killed_and_back(made, engine)
        await engine.until(lambda: len(traffic(engine)) == 2, "it gets traffic")
        engine.release(tokens=[7, 2])
        assert spans(await made.take()) == [[stamped(0, 0, 2)]]


async def test_restarted_during_an_update_it_is_named() -> None:
    """Too fast for any probe: that the process is another shows when the update asks, and it is kept out."""  # P19 P24
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        engine.load(1)
        await engine.restart()
        with pytest.raises(NotNow) as failed:
            await made.service.update_weights(1, EXTERNAL)
        assert "another process" in failed.value.detail["workers"]["w0"]["error"]
        assert made.worker().version is None
        assert engine.weights == 0
        await made.resume()
        await engine.wait_requests(2)  # no update has reached anybody: these are the weights of the start
        engine.release(tokens=[7, 2])
        assert [span["version"] for span in spans(await made.take())[0]] == [0]


async def test_a_broken_connection_is_no_restart() -> None:
    """Its metrics say that it is the same process: it stays in traffic with what it was given."""  # P19
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await updated(made, engine, 1)
        await engine.wait_requests(2)
        engine.release(fate=Reset())
        engine.release()
        await engine.wait_requests(3)
        assert made.worker().state is WorkerState.ACTIVE
        engine.release(tokens=[7, 2])
        assert spans(await made.take(step=1))[0][-1]["version"] == 1


async def test_a_process_that_fell_silent_and_woke_keeps_its_weights() -> None:
    """Dead to us for a while, it is the same process: let in again with the version it was given."""  # P19
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await updated(made, engine, 1)
        await engine.wait_requests(2)
        await engine.refuse()
        runner = engine._runner
        assert runner is not None
        assert runner.server is not None
        for connection in list(runner.server.connections):
            reset_connection(connection.transport)
        await made.until(lambda: made.worker().state is WorkerState.DEAD)
        engine.release()
        await engine.listen()
        await engine.wait_requests(3)
        assert made.worker().version == 1


async def test_without_metrics_a_broken_connection_is_a_doubt() -> None:
    """Nothing tells whether it is the same process: out of traffic until an update names it."""  # P24
    async with FakeLMDeploy(metrics=False) as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await updated(made, engine, 1)
        await engine.wait_requests(2)
        engine.release(fate=Reset())
        engine.release()
        await made.until(lambda: made.worker().state is WorkerState.QUARANTINED)
        assert "no weight version" in made.worker().reason
        assert not made.of(SampleFailed)


# -- stopping ------------------------------------------------------------------------------------------------


async def test_abort_all_stops_what_runs_and_what_waits() -> None:
    """Ours alone, it is stopped in one call, the waiting too; every answer came: a clean pause."""  # P8 P9
    async with FakeLMDeploy(slots=2) as engine, stage(engine, pushed=4) as made:
        await engine.wait_requests(4)
        assert (engine.running, engine.waiting) == (2, 2)
        report = await made.pause()
        assert report.clean
        assert report.workers["w0"].as_json() | {"residual": None} == {
            "in_flight": 4, "answered": 4, "late": 0, "cancelled": 0, "abandoned": 0, "residual": None,
        }  # fmt: skip
        assert engine.aborts == [{"abort_all": True}]
        assert not engine.live
        await made.resume()
        await engine.wait_requests(8)
        engine.answer = answered
        engine.release(tokens=[7, 2])
        assert len((await made.take(groups=4))["groups"]) == 4


@pytest.mark.parametrize("handler_cancellation", [True, False])
async def test_on_a_shared_engine_a_waiting_request_ends_with_its_connection(handler_cancellation: bool) -> None:
    """By id its abort is lost for good: the second one closes its connection, and the report says so."""  # P8 P9
    shared: dict[str, Any] = {"dialect": "lmdeploy", "exclusive": False}
    async with FakeLMDeploy(slots=1, handler_cancellation=handler_cancellation) as engine:
        engine.lose_aborts = lambda call: call.session_id == 5  # somebody else's, which holds the only handle
        others = engine.submit({"session_id": 5, "input_ids": [1]}, {})
        assert others is not None
        async with stage(shared | {"url": engine.url}, pushed=1) as made:
            engine.listeners.append(made.bell.ring)
            await engine.wait_requests(2)
            report = await made.pause()
            assert [body["abort_all"] for body in engine.aborts] == [False]
            assert engine.count("/abort_request") >= 3  # the probe's, the one that was taken, and one that found nobody
            assert (report.workers["w0"].cancelled, report.workers["w0"].residual) == (1, None)
            assert not report.clean
            assert (others.state, made.samples("aborted")) == ("running", 1)
            await engine.until(lambda: all(r.transport is None for r in engine.clients.values()), "it left")
            if handler_cancellation:
                assert list(engine.live.values()) == [others]
            engine.finish(others, Reply(tokens=1))
            engine.notice_disconnects()
            await engine.wait_idle()


async def test_behind_a_concurrency_limit_a_pause_returns_in_time() -> None:
    """`--max-concurrent-requests` queues the abort behind the work it should stop: what is left is named."""  # P8 P9
    async with FakeLMDeploy(max_concurrent=3) as engine, stage(engine, pushed=4) as made:
        await engine.wait_running(3)
        report = await made.pause(0.6)
        assert not report.clean
        assert not engine.aborts
        assert report.workers["w0"].cancelled == 4
        assert len(report.abandoned) == 4
        assert made.worker().state is WorkerState.QUARANTINED
        engine.release(finish="length")


@pytest.mark.parametrize("handler_cancellation", [True, False])
async def test_streams_are_stopped_behind_a_concurrency_limit(handler_cancellation: bool) -> None:
    """A stream gives its place back with its head: the abort is prompt, and every token came."""  # P8 P10
    async with (
        FakeLMDeploy(max_concurrent=2, handler_cancellation=handler_cancellation) as engine,
        stage({"url": engine.url, "stream": True}, pushed=4) as made,
    ):
        engine.listeners.append(made.bell.ring)
        await engine.wait_running(4)
        for call in engine.requests:
            engine.advance(call, 3)
        report = await made.pause()
        assert report.clean
        assert report.workers["w0"].answered == 4
        assert made.samples("aborted") == 4
        await made.resume()
        await engine.wait_requests(8)
        assert {len(call.prompt_ids) for call in engine.requests[4:]} == {4 + 3}
        engine.release(tokens=[7, 2])


async def test_an_abort_that_is_lost_ends_by_the_rungs() -> None:
    """It cannot count: what did not answer is cancelled and named, and the way back is one token."""  # P8 P9
    async with FakeLMDeploy() as engine, stage(engine, pushed=2, pause={"quarantine_s": 0.2}) as made:
        engine.lose_aborts = True
        await engine.wait_running(2)
        report = await made.pause(0.5)
        assert (report.clean, report.workers["w0"].residual, report.workers["w0"].cancelled) == (False, None, 2)
        assert len(report.abandoned) == 2
        await made.resume()
        await engine.wait_requests(3)
        canary = engine.requests[2]
        assert (canary.prompt_ids, canary.max_tokens) == ([0], 1)
        assert made.worker().state is WorkerState.QUARANTINED
        engine.lose_aborts = False
        engine.finish(canary, Reply(finish="length"))
        await engine.wait_requests(5)


async def test_a_freeze_is_refused_by_name() -> None:
    """No engine here can do mode `keep`."""  # P35
    async with FakeLMDeploy() as engine, stage(engine) as made:
        with pytest.raises(BadRequest, match="keep"):
            await made.pause(mode="keep")


# -- failing -------------------------------------------------------------------------------------------------


async def test_asleep_it_is_not_ready_and_nothing_is_lost() -> None:
    """503 while asleep costs no sample anything; awake again it has traffic."""  # P18 P19
    async with FakeLMDeploy() as engine, stage(engine, pushed=3) as made:
        await engine.wait_running(3)
        engine.sleep()
        engine.poll_health()
        await made.until(lambda: made.worker().state is WorkerState.RECOVERING)
        admitted = made.groups("admitted")
        engine.answer = answered
        engine.wake([])
        engine.poll_health()
        batch = await made.take(groups=3)
        assert len(batch["groups"]) == 3
        assert made.groups("admitted") == admitted
        assert not made.of(SampleFailed)


@pytest.mark.parametrize(
    ("switch", "words"), [("abort_handling", "--enable-abort-handling"), ("logprobs", "--logprobs-mode")]
)
async def test_a_missing_switch_is_named(switch: str, words: str) -> None:
    """An engine that could not be stopped, or gives no logprobs, gets no traffic; the flag it lacks is named."""  # P35
    async with FakeLMDeploy(**{switch: False}) as engine, stage(engine, pushed=1, ready=False) as made:  # type: ignore[arg-type]
        await made.until(lambda: words in made.worker().reason)
        assert made.worker().state is WorkerState.RECOVERING
        assert not engine.requests


async def test_another_engine_is_refused_with_what_it_answered() -> None:
    """An engine that is no LMDeploy, configured as one: no traffic, and one line that says what came."""  # P35
    async with FakeSGLang() as engine, stage({"url": engine.url, "dialect": "lmdeploy"}, ready=False) as made:
        await made.until(lambda: "GET /v1/models" in made.worker().reason)
        assert made.worker().state is WorkerState.RECOVERING


async def test_it_is_recognised() -> None:
    """`auto` asks it; status says what it is and can do."""
    async with (
        FakeLMDeploy(model="m", api_key="k", experts=TINY) as engine,
        stage({"url": engine.url, "api_key": "k"}) as made,
    ):
        record = made.worker().as_json()
        assert (record["dialect"], record["model"]) == ("lmdeploy", "m")
        ways = ["cuda_ipc", "distributed"]
        can = ["abort", "abort_all", "stream", "experts", *ways, "offload", "weights_backup"]
        assert record["capabilities"] == can


async def test_partial_tokens_survive_a_cut_stream() -> None:
    """What a stream had brought when its connection broke is the next call's prefix."""  # P10
    async with FakeLMDeploy() as engine, stage({"url": engine.url, "stream": True}, pushed=1) as made:
        engine.listeners.append(made.bell.ring)
        await engine.wait_running(1)
        [call] = engine.requests
        for _ in range(2):
            engine.advance(call, 2)
        engine.release(fate=Cut())
        await engine.wait_requests(2)
        assert engine.requests[1].prompt_ids[:4] == call.prompt_ids
        made_before = len(engine.requests[1].prompt_ids) - 4
        engine.release(tokens=[7, 2])
        [[*_, last]] = spans(await made.take())
        assert last["end"] == made_before + 2


@pytest.mark.parametrize("fate", [Status(500, b"Internal Server Error"), Raw(b""), Status(499), Status(400)])
async def test_every_answer_ends_typed(fate: Any) -> None:
    """An error, nothing, a refusal: tried again, elsewhere or as the sample's next attempt, and never a crash."""  # P4
    async with FakeLMDeploy() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.release(fate=fate)
        await engine.wait_requests(2)
        engine.release(tokens=[7, 2])
        assert spans(await made.take()) == [[stamped(0, 0, 2)]]
