"""The account of what an update took."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from rollout_svc.events import EventBus, WeightsUpdated, WeightUpdateEnded
from rollout_svc.observe.metrics import Metrics
from rollout_svc.observe.terminal import show_status
from rollout_svc.weights.phases import Phases
from rollout_svc.weights.publisher import WeightPublisher
from tests.embedded.helpers import served, small_model
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM
from tests.support.stage import stage

ORDER = ["pause", "flatten", "transfer", "load", "confirm", "resume"]


@given(st.lists(st.tuples(st.sampled_from(ORDER), st.floats(0, 100))))
def test_phases_add_up_in_their_order(added: list[tuple[str, float]]) -> None:
    """Whatever order they are counted in; what did not take place is not there."""
    phases = Phases(lambda: 0.0)
    for phase, seconds in added:
        phases.add(phase, seconds)  # type: ignore[arg-type]
    found = phases.seconds
    assert list(found) == [phase for phase in ORDER if phase in dict(added)]
    for phase, seconds in found.items():
        assert seconds == pytest.approx(sum(took for name, took in added if name == phase), abs=1e-5)


def test_a_phase_that_fails_has_taken_its_time() -> None:
    """By the clock that was given."""
    ticks = count(0, 2)
    phases = Phases(lambda: float(next(ticks)))
    with pytest.raises(ValueError, match="lost"), phases.during("load"):
        raise ValueError("lost")
    assert phases.seconds == {"load": 2.0}


def test_what_follows_may_be_another_phase() -> None:
    """From a word on the time is another phase's, and that is the one under way; said twice it goes on."""
    ticks = count(0, 2)
    phases = Phases(lambda: float(next(ticks)))
    with phases.during("load") as turn:
        for _ in range(2):
            turn("confirm")
            assert phases.now == "confirm"
    assert phases.now is None
    assert phases.seconds == {"load": 2.0, "confirm": 4.0}


@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
async def test_a_path_is_loaded_and_then_confirmed(kind: Any, tmp_path: Path) -> None:
    """P24: `load` ends when the slowest engine has the weights; caches flushed and labels read are `confirm`."""
    source = {"kind": "disk", "path": str(tmp_path)}
    async with kind(weight_version="0") as one, kind(weight_version="0") as two, stage(one, two) as made:
        seen: list[tuple[str, str]] = []

        def noting(word: str, of: Any) -> Any:
            def noted(*given: Any, **settings: Any) -> Any:
                if (phase := made.service.status()["weights"]["phase"]) is not None:
                    seen.append((word, phase))
                return of(*given, **settings)

            return noted

        for engine in (one, two):
            engine.set_version = noting("label", engine.set_version)
            if kind is FakeVLLM:
                engine.load = noting("load", engine.load)
                engine.reset_cache = noting("flush", engine.reset_cache)
        await made.service.update_weights(1, source, pause={})
        found = made.service.status()["weights"]["phases_s"]
        assert list(found) == ["pause", "load", "confirm", "resume"]
        assert found["confirm"] > 0
        if kind is FakeVLLM:
            assert {phase for word, phase in seen if word == "load"} == {"load"}
            assert seen[-1] == ("label", "confirm")
            assert [word for word, _ in seen].count("flush") == 2


async def test_an_update_tells_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """All six in status, in their order, on a terminal, and in the one event that tells of the end."""
    wanted = small_model(seed=1).state_dict()
    nbytes = sum(tensor.nbytes for tensor in wanted.values())
    idle = {"version": 0, "state": "idle", "phase": None, "phases_s": {}, "buckets": 0, "bytes": 0}
    async with served(is_open=True) as engine, stage(str(engine.session._base_url)) as made:
        assert made.service.status()["weights"] == idle | {"total_bytes": None, "seconds": 0.0, "error": ""}
        async with WeightPublisher(made.service, bucket_bytes=2**16) as publisher:
            await publisher.publish(wanted, 1, pause={})
        weights = made.service.status()["weights"]
        show_status(made.service.status())
        [moved, ended] = [event for event in made.events if isinstance(event, WeightsUpdated | WeightUpdateEnded)]
        assert (weights["version"], weights["state"], weights["phase"]) == (1, "idle", None)
        assert list(weights["phases_s"]) == ORDER
        assert weights["buckets"] > 1
        assert weights["bytes"] == weights["total_bytes"] == nbytes
        assert isinstance(moved, WeightsUpdated)
        assert isinstance(ended, WeightUpdateEnded)
        assert list(moved.phases) == ORDER[:-1]
        assert ended.phases == weights["phases_s"]
        assert (ended.ok, ended.error, ended.buckets, ended.bytes) == (True, "", weights["buckets"], nbytes)
        assert all(ended.phases[phase] > 0 for phase in ORDER)
        assert sum(ended.phases.values()) <= ended.seconds + 1e-5
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update:")]
    assert all(phase in line for phase in ORDER)


def test_phases_are_a_metric() -> None:
    """One histogram, by phase, the last one too."""
    bus = EventBus(on_error=lambda *_: None)
    metrics = Metrics(bus, dict)
    bus.emit(WeightUpdateEnded(1, "shm", True, 0.6, {"flatten": 0.2, "load": 0.3, "resume": 0.1}, 1, 8, ""))
    page = generate_latest(metrics.registry).decode()
    assert 'rollout_weight_update_seconds_sum{phase="flatten"} 0.2' in page
    assert 'rollout_weight_update_seconds_count{phase="load"} 1.0' in page
    assert 'rollout_weight_update_seconds_sum{phase="resume"} 0.1' in page
