"""The fleet under updates: who is believed, who is kept out and how often tried again, and what a larger one costs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import BadRequest, NotNow
from rollout_svc.workers import supervisor
from rollout_svc.workers.worker import Worker, WorkerState
from tests.support.fake_sglang import FakeSGLang, Hang, Status
from tests.support.stage import stage

EXTERNAL = {"kind": "external"}


def disk(path: Path) -> dict[str, Any]:
    """Make a source of that folder."""
    return {"kind": "disk", "path": str(path)}


async def test_a_worker_that_came_after_the_gate_closed_is_believed_by_its_own_label_alone() -> None:
    """Nobody can have given it the weights: not labelled, out of traffic, no fault of the others."""  # P7 P24
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as late,
        stage(one, pushed=1) as made,
    ):
        await one.wait_running(1)
        await made.pause()
        await made.service.add_worker(WorkerConfig(url=late.url))
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        answer = await made.service.update_weights(1, EXTERNAL)
        assert answer["version"] == 1
        assert answer["workers"]["w0"] == {"ok": True, "version": 1}
        assert (answer["workers"]["w1"]["ok"], answer["workers"]["w1"]["version"]) == (False, 0)
        assert (late.weight_version, late.updates) == ("0", [])
        assert made.worker(1).state is WorkerState.QUARANTINED
        await made.resume(weight_version=1)
        await one.wait_requests(2)
        assert not late.requests
        late.set_version("1")
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)


async def test_a_cache_that_was_not_flushed_keeps_its_worker_out() -> None:
    """The label is right and the prefixes are old: 503, quarantined, and back only once the flush worked."""  # P25
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as other,
        stage(one, other) as made,
    ):
        await made.pause()
        other.script("/flush_cache", Status(500), times=None)
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, EXTERNAL)
        workers = refused.value.detail["workers"]
        assert workers["w0"] == {"ok": True, "version": 1}
        assert (workers["w1"]["ok"], workers["w1"]["version"], workers["w1"]["flushed"]) == (False, 1, False)
        assert made.worker(1).state is WorkerState.QUARANTINED
        assert "cache" in made.worker(1).reason
        await made.resume()
        await made.push(4)
        await one.wait_running(2)
        await made.until(lambda: made.worker(1).refusals > 0)  # its label alone does not bring it back
        assert (made.worker(1).state, other.requests) == (WorkerState.QUARANTINED, [])
        other.heal()
        flushes = other.count("/flush_cache")
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert other.count("/flush_cache") == flushes + 1


async def test_weights_that_are_refused_are_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal of a replay doubles the wait, up to half a minute; the next update begins anew."""  # P20
    waits: list[float] = []
    attention = supervisor._attention

    async def noted(worker: Worker, seconds: float) -> None:
        if worker.state is not WorkerState.QUARANTINED:
            await attention(worker, seconds)
        elif len(waits) < 8:
            waits.append(seconds)
        else:
            await attention(worker, 60.0)

    monkeypatch.setattr(supervisor, "_attention", noted)
    monkeypatch.setattr(supervisor, "_RESIDUAL_POLL_S", 0.5)  # as in production: the cap is, too
    async with (
        FakeSGLang(weight_version="0") as one,
        FakeSGLang(weight_version="0") as other,
        stage(one, other) as made,
    ):
        other.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, disk(tmp_path), pause={})
        await made.until(lambda: made.worker(1).refusals == 8)
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert len(other.updates) == 1 + 8
        other.fail_update = False
        answer = await made.service.update_weights(2, disk(tmp_path))
        assert answer["workers"]["w1"] == {"ok": True, "version": 2}
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert made.worker(1).refusals == 0


@pytest.mark.parametrize("during", ["update", "pause"])
async def test_whoever_pauses_during_an_update_finds_the_stage_paused_after_it(tmp_path: Path, during: str) -> None:
    """An update resumes for its own caller alone: a second pauser got the same ticket, and keeps it."""  # P11
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        engine.script("/update_weights_from_disk", Hang())
        engine.lose_aborts = True
        updating = made.start(made.service.update_weights(1, disk(tmp_path), pause={}))
        await engine.wait_aborts(1)
        if during == "pause":
            second = made.start(made.pause())
            await made.until(lambda: made.parts.pauses.asked == 2)
        engine.lose_aborts = False
        engine.release(tokens=1)
        await engine.wait_hits("/update_weights_from_disk", 1)
        report = await (made.pause() if during == "update" else second)
        engine.heal()
        assert (await updating)["version"] == 1
        assert (made.service.state, made.service.status()["ticket"]) == ("paused", report.ticket)
        assert len(engine.requests) == 1
        await made.resume(ticket=report.ticket)
        assert len((await made.take(step=1))["groups"]) == 1


async def test_a_worker_too_many_for_the_open_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding an engine asks for the larger fleet's files first: 400 with the numbers, nothing changed."""  # P35
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        raised: list[tuple[int, int]] = []
        limits = SimpleNamespace(
            RLIMIT_NOFILE=7,
            getrlimit=lambda _: (1000, 20_000),
            setrlimit=lambda _, pair: raised.append(pair),
        )
        monkeypatch.setattr("rollout_svc.limits.resource", limits)
        plan, limit = made.service.concurrency(), made.worker().limit
        with pytest.raises(BadRequest, match="the hard limit is 20000"):
            await made.service.add_worker(WorkerConfig(url="http://127.0.0.1:9", max_batch=50_000))
        assert [worker["id"] for worker in made.service.workers()] == ["w0"]
        assert (made.service.concurrency(), made.worker().limit, raised) == (plan, limit, [])
        async with FakeSGLang(weight_version="0") as other:
            added = await made.service.add_worker(WorkerConfig(url=other.url, max_batch=2000))
            assert added["id"] == "w1"
            [(soft, hard)] = raised
            assert 2000 < soft < hard == 20_000
            await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
