"""Weights: moved only under a pause, confirmed by every engine, named where they did not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.events import WeightsUpdated
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_sglang import Call, FakeSGLang, Hang, Raw, Reply, Status
from tests.support.stage import Stage, stage

EXTERNAL = {"kind": "external"}


def disk(path: Path) -> dict[str, Any]:
    """Make a source of that folder."""
    return {"kind": "disk", "path": str(path)}


def two(check: Callable[[Stage, FakeSGLang, FakeSGLang], Any], **settings: Any) -> Any:
    """Run a check on a stage of two engines at version 0."""

    async def run() -> None:
        async with (
            FakeSGLang(weight_version="0") as one,
            FakeSGLang(weight_version="0") as other,
            stage(one, other, **settings) as made,
        ):
            await check(made, one, other)

    return run()


async def test_disk_loads_every_engine_and_has_it_confirm(tmp_path: Path) -> None:
    """Paused, each engine loads the path under the new label; status, tokens and `resume` then speak of it."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        answer = await made.service.update_weights(1, disk(tmp_path))
        assert answer == {"version": 1, "workers": {"w0": {"ok": True, "version": 1}}}
        [(path, body)] = engine.updates
        assert path == "/update_weights_from_disk"
        assert body == {
            "model_path": str(tmp_path),
            "weight_version": "1",
            "flush_cache": True,
            "abort_all_requests": False,
        }
        assert made.service.state == "paused"
        assert made.service.status()["weight_version"] == 1
        with pytest.raises(Conflict) as refused:
            await made.resume(weight_version=2)
        assert refused.value.detail == {"weight_version": 2, "workers": {"w0": 1}}
        assert (await made.resume(weight_version=1))["state"] == "running"


async def test_tokens_over_an_update_carry_both_versions(tmp_path: Path) -> None:
    """A sample that was cut under 0 and goes on under 1 has two spans, and is as stale as its oldest token."""  # P7
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.tokens_so_far = 2
        await engine.wait_running(1)
        await made.service.update_weights(1, disk(tmp_path), pause={})
        await engine.wait_requests(2)
        engine.release(tokens=[7, 8, 9])
        batch = await made.take(step=1)
        [sample] = batch["groups"][0]["samples"]
        assert sample["weight_versions"] == [
            {"version": 0, "start": 0, "end": 2},
            {"version": 1, "start": 2, "end": 5},
        ]
        assert batch["metrics"]["staleness"] == {"1": 1}
        assert batch["metrics"]["mixed_versions"] == 1


async def test_while_running_a_pause_is_needed(tmp_path: Path) -> None:
    """Without `pause` it is 409 and nothing moves; with it, pause, update and resume are one call."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(1, disk(tmp_path))
        assert refused.value.type == "not_paused"
        assert (engine.updates, engine.running, made.service.state) == ([], 1, "running")
        await made.service.update_weights(1, disk(tmp_path), pause={"deadline_s": 1.0})
        assert made.service.state == "running"
        assert made.service.status()["ticket"] == 1
        await engine.wait_requests(2)


async def test_a_lane_that_runs_refuses_weights_and_stays_as_it_was(tmp_path: Path) -> None:
    """Every lane must be drained: the one that is not is named, and the stage is left as it was found."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(1, disk(tmp_path), pause={"lanes": ("train",)})
        assert refused.value.detail == {"lanes": ["eval"]}
        assert (made.service.state, engine.running, engine.updates) == ("running", 1, [])
        await made.pause(lanes=("train",))
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(1, disk(tmp_path))
        assert refused.value.detail == {"lanes": ["eval"]}
        assert made.service.state == "paused"


async def test_a_failed_update_stays_paused_and_names_the_odd_one(tmp_path: Path) -> None:
    """One engine that fails: 503 with both named, the stage stays paused, the odd one is out of traffic."""  # P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        await made.until(lambda: one.running == 2 and other.running == 2)
        other.fail_update = True
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, disk(tmp_path), pause={})
        assert refused.value.type == "update_failed"
        record = refused.value.detail
        assert record["version"] == 1
        assert record["workers"]["w0"] == {"ok": True, "version": 1}
        assert (record["workers"]["w1"]["ok"], record["workers"]["w1"]["version"]) == (False, 0)
        assert "Failed to update weights" in record["workers"]["w1"]["error"]
        assert made.service.state == "paused"
        assert made.worker(1).state is WorkerState.QUARANTINED
        assert made.of(WeightsUpdated)[-1].odd == ("w1",)
        await made.resume()
        await made.until(lambda: one.running == 2)
        assert len(other.requests) == 2
        other.fail_update = False
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)  # the path is loaded again for it
        assert other.weight_version == "1"

    await two(check, pushed=4)


async def test_an_update_that_fails_everywhere_changes_nothing(tmp_path: Path) -> None:
    """No engine took it: 503, paused, and the fleet is on its old version, in traffic."""  # P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        one.fail_update = other.fail_update = "out of memory"
        await made.pause()
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, disk(tmp_path))
        assert refused.value.detail["version"] == 0
        assert "out of memory" in str(refused.value.detail)
        assert made.service.state == "paused"
        assert made.service.status()["weight_version"] == 0
        await made.resume(weight_version=0)
        await made.until(lambda: one.running == 2 and other.running == 2)

    await two(check, pushed=4)


@pytest.mark.parametrize("fault", [Raw(b"{not json"), Status(500), Status(401)])
async def test_a_control_route_that_answers_rubbish_is_a_failed_update(tmp_path: Path, fault: Any) -> None:
    """Whatever a control call is answered with, the update fails by name, and the other engine counts."""  # P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        other.script("/update_weights_from_disk", fault)
        await made.pause()
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, disk(tmp_path))
        assert refused.value.detail["workers"]["w0"] == {"ok": True, "version": 1}
        assert refused.value.detail["workers"]["w1"]["ok"] is False
        await made.resume()
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert other.weight_version == "1"

    await two(check)


async def test_an_abort_answered_with_rubbish_is_repeated() -> None:
    """A control call whose answer cannot be read failed: the ladder goes on, and no task dies of it."""  # P12
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        engine.script("/abort_request", Raw(b"{not json"), times=2)
        pausing = made.start(made.pause())
        await engine.wait_hits("/abort_request", 3)
        engine.release()
        assert (await pausing).clean
        engine.lose_aborts = False


async def test_external_sets_the_label_that_lags() -> None:
    """The trainer moved the weights: an engine with the previous label is labelled, its cache flushed."""  # P25

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        other.set_version("1")
        await made.pause()
        answer = await made.service.update_weights(1, EXTERNAL)
        assert answer == {"version": 1, "workers": {f"w{n}": {"ok": True, "version": 1} for n in range(2)}}
        assert [path for path, _ in one.updates] == ["/update_weight_version"]
        assert one.updates[0][1] == {"new_version": "1", "abort_all_requests": False}
        assert not other.updates
        assert (one.count("/flush_cache"), other.count("/flush_cache")) == (1, 1)
        await made.resume(weight_version=1)

    await two(check)


async def test_external_names_the_odd_one() -> None:
    """An engine that reports neither the previous nor the new version is odd: 503, named, out of traffic."""  # P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        await made.pause()
        other.set_version("7")
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, EXTERNAL)
        workers = refused.value.detail["workers"]
        assert (workers["w0"]["ok"], workers["w1"]["ok"], workers["w1"]["version"]) == (True, False, 7)
        assert made.worker(1).state is WorkerState.QUARANTINED
        assert made.service.state == "paused"
        await made.resume()
        await made.until(lambda: one.running == 2)
        assert not other.requests
        other.set_version("1")  # once it reports the version it may come back
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)

    await two(check, pushed=8)


async def test_a_worker_that_missed_an_external_update_waits_for_the_next() -> None:
    """It cannot be replayed: the worker stays out and says so, until the next update reaches it."""  # P19 P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        await made.service.update_weights(1, EXTERNAL, pause={})
        await other.restart()
        await made.until(lambda: one.running == 2)
        await made.until(lambda: "cannot be replayed" in made.worker(1).reason)
        assert made.worker(1).state is WorkerState.QUARANTINED
        with pytest.raises(NotNow) as refused:
            await made.take(step=1, timeout_s=0.01)
        assert "cannot be replayed" in refused.value.detail["workers"]["w1"]
        other.set_version("2")
        answer = await made.service.update_weights(2, EXTERNAL, pause={})
        assert answer["workers"]["w1"] == {"ok": True, "version": 2}
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)

    await two(check, pushed=8)


async def test_a_dead_worker_does_not_fail_an_update(tmp_path: Path) -> None:
    """A worker that is out of traffic is skipped and listed, and has the weights loaded when it returns."""  # P19 P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        await made.until(lambda: one.running == 4 and other.running == 4)
        await other.kill()
        await made.until(lambda: made.worker(1).state is not WorkerState.ACTIVE)
        answer = await made.service.update_weights(1, disk(tmp_path), pause={"deadline_s": 1.0})
        assert answer["workers"]["w0"] == {"ok": True, "version": 1}
        assert answer["workers"]["w1"]["ok"] is False
        assert made.service.state == "running"
        await other.listen()
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert other.weight_version == "1"

    await two(check, pushed=8, trainer={"train_batch_size": 8})


async def test_a_quarantined_worker_gets_no_weights_until_it_is_out(tmp_path: Path) -> None:
    """A worker that still runs abandoned requests is skipped and listed; idle, it gets them first."""  # P9 P24

    async def check(made: Stage, one: FakeSGLang, other: FakeSGLang) -> None:
        await made.until(lambda: one.running == 2 and other.running == 2)
        other.lose_aborts = True
        await made.pause(0.4)
        answer = await made.service.update_weights(1, disk(tmp_path))
        assert answer["workers"]["w0"] == {"ok": True, "version": 1}
        assert answer["workers"]["w1"]["skipped"].startswith("QUARANTINED")
        assert not other.updates
        await made.resume(weight_version=1)
        other.lose_aborts = False
        other.release()
        await made.until(lambda: made.worker(1).state is WorkerState.ACTIVE)
        assert [path for path, _ in other.updates] == ["/update_weights_from_disk"]
        assert made.worker(1).version == 1

    await two(check, pushed=4)


async def test_with_no_worker_left_an_update_is_refused(tmp_path: Path) -> None:
    """No worker in traffic: 503 with all of them listed, and the stage stays paused."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.lose_aborts = True
        await engine.wait_running(1)
        await made.pause(0.4)
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, disk(tmp_path))
        assert refused.value.type == "update_failed"
        assert list(refused.value.detail["workers"]) == ["w0"]
        assert made.service.state == "paused"
        engine.lose_aborts = False
        engine.release()


async def test_labels_at_registration() -> None:
    """A label that is no integer is set to `initial_version` before traffic; an integer one is taken over."""  # P7
    async with (
        FakeSGLang() as fresh,
        FakeSGLang(weight_version="5") as seasoned,
        stage(fresh, pushed=1, trainer={"initial_version": 3}) as made,
    ):
        await fresh.wait_running(1)
        assert fresh.weight_version == "3"
        assert fresh.hits.index(("POST", "/update_weight_version")) < fresh.hits.index(("POST", "/generate"))
        assert made.service.status()["weight_version"] == 3
        async with stage(seasoned, trainer={"initial_version": 3}) as later:
            assert later.service.status()["weight_version"] == 5
            assert not seasoned.updates


async def test_a_fresh_engine_is_not_given_a_version_it_cannot_have() -> None:
    """A fleet found at version 5 has weights that are not its start: an engine without a label stays out."""  # P19 P24
    async with FakeSGLang(weight_version="5") as engine, stage(engine) as made:
        assert made.service.status()["weight_version"] == 5
        await engine.restart()
        engine.answer = lambda _: Reply(tokens=1)
        await made.push(1)
        await made.until(lambda: made.worker().state is WorkerState.QUARANTINED)
        await made.until(lambda: "cannot be replayed" in made.worker().reason)
        assert engine.weight_version == "default"


async def test_a_resume_waits_for_an_update_under_way(tmp_path: Path) -> None:
    """The gate does not open over an engine that is loading."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        engine.script("/update_weights_from_disk", Hang())
        updating = made.start(made.service.update_weights(1, disk(tmp_path)))
        await engine.wait_hits("/update_weights_from_disk", 1)
        resuming = [made.start(made.service.resume(weight_version=version)) for version in (None, 1)]
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(2, disk(tmp_path))
        assert refused.value.type == "updating"
        await made.until(lambda: made.service.state == "resuming")
        assert not any(task.done() for task in resuming)
        engine.heal()
        assert (await updating)["version"] == 1
        assert {(await task)["state"] for task in resuming} == {"running"}
        await engine.wait_requests(2)


async def test_a_resume_that_is_asking_engines_does_not_open_over_an_update(tmp_path: Path) -> None:
    """An update that begins while a resume checks versions is waited for as well."""  # P24
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.pause()
        asked = engine.count("/model_info")
        engine.script("/model_info", Hang())
        resuming = made.start(made.service.resume(weight_version=0))
        await engine.wait_hits("/model_info", asked + 1)
        engine.script("/update_weights_from_disk", Hang())
        updating = made.start(made.service.update_weights(1, disk(tmp_path)))
        await engine.wait_hits("/update_weights_from_disk", 1)
        engine.heal("/model_info")
        await asyncio.wait({resuming}, timeout=0.2)
        assert not made.parts.gate.is_open("train")
        engine.heal()
        await updating
        with pytest.raises(Conflict):  # it asked for version 0, and that is no longer the case
            await resuming
        assert made.service.state == "paused"


@pytest.mark.parametrize("source", [{"kind": "tensors"}, {"kind": "disk"}, {}])
async def test_sources_that_cannot_be_used(source: dict[str, Any]) -> None:
    """An unknown kind, or disk without a path, is refused before anything is paused."""  # P35
    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        with pytest.raises(BadRequest):
            await made.service.update_weights(1, source, pause={})
        assert made.service.status()["ticket"] == 0


async def test_prefixes_made_under_old_weights_are_dropped(tmp_path: Path) -> None:
    """A load flushes the cache in the same call; an external update by a call of its own."""  # P25

    def answer(call: Call) -> Reply:
        return Reply(tokens=1)

    async with FakeSGLang(weight_version="0") as engine, stage(engine) as made:
        engine.answer = answer
        await made.service.update_weights(1, disk(tmp_path), pause={})
        assert engine.updates[0][1]["flush_cache"] is True
        await made.service.update_weights(2, EXTERNAL, pause={})
        assert engine.count("/flush_cache") == 1
