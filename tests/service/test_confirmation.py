"""An engine that reports no weight version shows which weights it has, by a known answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import NotNow
from rollout_svc.events import WeightsUnconfirmed
from rollout_svc.weights import confirmation
from rollout_svc.weights.probe import Probe
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.workers.worker import WorkerState
from tests.embedded.helpers import served, small_model
from tests.support.fake_lmdeploy import Call, FakeLMDeploy, Reply, Status
from tests.support.fake_sglang import FakeSGLang
from tests.support.stage import Stage, stage

PROMPT = [11, 12, 13]
PROBE: dict[str, Any] = {"prompt_ids": PROMPT, "response_ids": [7, 2], "logprobs": [-0.5, -0.25]}
EXTERNAL: dict[str, Any] = {"kind": "external", "probe": PROBE}


def knowing(*logprobs: float, tokens: tuple[int, ...] = (7, 2)) -> Any:
    """Answer the probe like that, and everything else too."""

    def answer(call: Call) -> Reply:
        if call.prompt_ids == PROMPT:
            return Reply(tokens=list(tokens), logprobs=list(logprobs), finish="length")
        return Reply(tokens=[7, 2])

    return answer


def asked(engine: FakeLMDeploy) -> list[Call]:
    """The probes it got."""
    return [call for call in engine.requests if call.prompt_ids == PROMPT]


async def update(made: Stage, version: int, source: dict[str, Any], *engines: FakeLMDeploy) -> dict[str, Any]:
    """Pause, have the trainer move its weights, tell the service, and let it go on if that was all right."""
    await made.pause()
    for engine in engines:
        engine.load(version)
    answer = await made.service.update_weights(version, source)
    await made.resume()
    return answer


async def test_a_known_answer_confirms_an_engine_without_labels() -> None:
    """P7 P24: greedily, as many tokens as were given, before the gate opens; the same within tolerance is enough."""
    async with FakeLMDeploy() as engine, stage(engine) as made:
        engine.answer = knowing(-0.505, -0.25)
        answer = await update(made, 1, EXTERNAL, engine)
        assert answer["workers"] == {"w0": {"ok": True, "version": 1, "probed": True}}
        [call] = asked(engine)
        assert (call.max_tokens, call.body["temperature"]) == (2, 0.0)
        assert not made.of(WeightsUnconfirmed)
        assert made.service.status()["workers"][0]["in_flight"] == 0
        await made.push(1)
        [sample] = (await made.take(step=1))["groups"][0]["samples"]
        assert sample["weight_versions"] == [{"version": 1, "start": 0, "end": 2, "confirmed": False}]


async def test_without_one_it_is_our_word_and_said_so() -> None:
    """The answer says `confirmed: false` each time; the log says it once for each worker."""  # P7
    async with FakeLMDeploy() as engine, FakeSGLang(weight_version="0") as other, stage(engine, other) as made:
        for version in (1, 2):
            answer = await update(made, version, {"kind": "external"}, engine)
            assert answer["workers"] == {
                "w0": {"ok": True, "version": version, "confirmed": False},
                "w1": {"ok": True, "version": version},
            }
        assert [event.worker for event in made.of(WeightsUnconfirmed)] == ["w0"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (knowing(-0.5, -0.25, tokens=(7, 3)), "it generates [7, 3], the known answer is [7, 2]"),
        (knowing(-0.5, -0.3), "token 1 has logprob -0.3, the known one is -0.25"),
        (lambda _: Status(500), "no answer"),
    ],
)
async def test_an_engine_with_other_weights_is_odd(wrong: Any, told: str) -> None:
    """It is named with both values, out of traffic until an update reaches it, and the stage stays paused."""  # P7 P24
    async with FakeLMDeploy() as engine, FakeLMDeploy() as other, stage(engine, other) as made:
        engine.answer, other.answer = knowing(-0.5, -0.25), wrong
        with pytest.raises(NotNow) as refused:
            await update(made, 1, EXTERNAL, engine, other)
        workers = refused.value.detail["workers"]
        assert workers["w0"] == {"ok": True, "version": 1, "probed": True}
        assert (workers["w1"]["ok"], workers["w1"]["version"]) == (False, None)
        assert told in workers["w1"]["error"]
        assert made.service.state == "paused"
        assert told in made.worker(1).reason
        await made.resume()
        await made.until(lambda: made.worker(1).refusals > 0)
        assert made.worker(1).state is WorkerState.QUARANTINED
        assert told in made.worker(1).reason
        other.answer = knowing(-0.5, -0.25)
        named = {**EXTERNAL, "workers": ["w0", "w1"]}
        assert (await update(made, 2, named, engine, other))["workers"]["w1"]["probed"] is True
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)


async def test_an_engine_that_fails_the_first_probe_is_not_taken_for_one_at_its_start() -> None:
    """No update has succeeded yet, and still nobody believes that it has the initial weights."""  # P24
    async with FakeLMDeploy() as engine, stage(engine) as made:
        engine.answer = knowing(-9.0, -9.0)
        with pytest.raises(NotNow):
            await update(made, 1, EXTERNAL, engine)
        await made.resume()
        await made.until(lambda: made.worker().refusals > 0)
        assert made.worker().state is WorkerState.QUARANTINED


async def test_every_engine_shows_what_it_has_where_that_is_asked_for() -> None:
    """P7 P24: a label alone is not enough with `every`: the built-in engine is asked, and one that lies is odd."""
    model = small_model(seed=1)
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:  # noqa: SIM117 - reads better
        async with WeightPublisher(made.service) as publisher:
            silent = await publisher.publish(model.state_dict(), 1, pause={}, probe=Probe.of(model, [1, 2, 3]))
            assert silent["workers"]["w0"] == {"ok": True, "version": 1}
            probe = Probe.of(model, [1, 2, 3], every=True)
            good = await publisher.publish(model.state_dict(), 2, pause={}, probe=probe)
            assert good["workers"]["w0"] == {"ok": True, "version": 2, "probed": True}
            with pytest.raises(NotNow) as refused:
                await publisher.publish(small_model(seed=2).state_dict(), 3, pause={}, probe=probe)
            assert "the probe of version 3" in refused.value.detail["workers"]["w0"]["error"]
            await made.resume()
            await engine.until(lambda: made.worker().refusals > 0)
            assert made.worker().state is WorkerState.QUARANTINED
            assert (await publisher.publish(model.state_dict(), 4, pause={}, probe=probe))["version"] == 4
            await made.until(lambda: made.worker().state is WorkerState.ACTIVE)


async def test_a_probe_that_is_not_answered_in_time_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """P24: the engine has its seconds, then the request is ended there, and the worker is odd."""
    monkeypatch.setattr(confirmation, "_PROBE_S", 0.05)
    async with FakeLMDeploy() as engine, stage(engine) as made:
        engine.answer = lambda _: None
        with pytest.raises(NotNow) as refused:
            await update(made, 1, EXTERNAL, engine)
        assert "no answer within 0.05 s" in refused.value.detail["workers"]["w0"]["error"]
        assert len(engine.aborts) == 1
        await engine.wait_idle()


async def test_a_frozen_engine_is_not_asked() -> None:
    """P7 P24: it would not answer: its label has to do, and the update says that nobody asked."""
    every = {**PROBE, "every": True}
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        answer = await made.service.update_weights(1, {"kind": "external", "probe": every}, pause={"mode": "keep"})
        assert answer["workers"] == {"w0": {"ok": True, "version": 1, "probed": False}}
        assert len(engine.requests) == 1
        engine.release()


async def test_one_that_has_weights_replayed_to_it_is_asked_before_it_gets_traffic(tmp_path: Path) -> None:
    """P7 P24: `disk` is loaded again where an engine answered wrongly, and then it has to answer rightly."""
    source = {"kind": "disk", "path": str(tmp_path), "probe": {**PROBE, "every": True}}
    async with (
        FakeSGLang(weight_version="0") as engine,
        FakeSGLang(weight_version="0") as other,
        stage(engine, other) as made,
    ):
        engine.answer, other.answer = knowing(-0.5, -0.25), knowing(-0.5, -0.35)
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, source, pause={})
        assert refused.value.detail["workers"]["w0"]["probed"] is True
        assert "-0.35" in refused.value.detail["workers"]["w1"]["error"]
        loads = len(other.updates)
        await made.resume()
        await made.until(lambda: len(other.updates) > loads + 1)
        assert made.worker(1).state is WorkerState.QUARANTINED
        assert "-0.35" in made.worker(1).reason
        other.answer = knowing(-0.5, -0.25)
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)


async def test_nothing_moves_to_an_engine_that_is_being_asked(tmp_path: Path) -> None:
    """P24: an update that comes while a worker on its way back is asked lists it, and leaves it for later."""
    source = {"kind": "disk", "path": str(tmp_path), "probe": {**PROBE, "every": True}}
    async with (
        FakeSGLang(weight_version="0") as engine,
        FakeSGLang(weight_version="0") as other,
        stage(engine, other) as made,
    ):
        engine.answer, other.answer = knowing(-0.5, -0.25), knowing(-9.0, -9.0)
        with pytest.raises(NotNow):
            await made.service.update_weights(1, source, pause={})
        other.answer = None  # the next one stays open
        await other.wait_running(1)
        loads = len(other.updates)
        answer = await made.service.update_weights(2, source)
        assert answer["workers"]["w0"] == {"ok": True, "version": 2, "probed": True}
        assert answer["workers"]["w1"]["skipped"].startswith("QUARANTINED")
        assert len(other.updates) == loads
        other.answer = knowing(-0.5, -0.25)
        other.release(tokens=[1])
        await made.resume()
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert other.weight_version == "2"
