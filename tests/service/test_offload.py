"""Engines put to sleep by a pause, and woken around an update: over fakes that die of what the real ones die of."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotNow
from rollout_svc.events import WorkerWoken
from rollout_svc.observe.terminal import show_status
from rollout_svc.workers.worker import WorkerState
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_lmdeploy import Reply as LMDeployReply
from tests.support.fake_sglang import FakeSGLang, Hang, Reply, Status
from tests.support.fake_vllm import FakeVLLM
from tests.support.stage import Stage, stage

BOTH = ("weights", "kv_cache")
SAVER = {"enable_memory_saver": True}
BACKUP = SAVER | {"enable_weights_cpu_backup": True}
DISK = {"kind": "disk", "path": "/weights/1"}
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def sglang(told: dict[str, Any] = BACKUP) -> FakeSGLang:
    """An SGLang that gives memory up."""
    engine = FakeSGLang(weight_version="0")
    engine.told = dict(told)
    return engine


def vllm(*, releases_cache: bool = True) -> FakeVLLM:
    """A vLLM in sleep mode."""
    engine = FakeVLLM(weight_version="0")
    engine.sleep_mode, engine.releases_cache = True, releases_cache
    return engine


def asleep(made: Stage) -> list[list[str]]:
    """What `status` says of each worker's sleep."""
    return [worker["asleep"] for worker in made.service.status()["workers"]]


def calls(engine: Any, *paths: str) -> list[str]:
    """Those calls of these routes that arrived, in order."""
    return [path for _, path in engine.hits if path in paths]


async def test_idle_engines_sleep_until_the_resume(capsys: pytest.CaptureFixture[str]) -> None:
    """The report and status name what each engine gave up; the resume takes it back before the gate opens."""
    async with sglang() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        report = await made.pause(offload=BOTH)
        assert (report.clean, report.offloaded, report.not_offloaded) == (True, {"w0": list(BOTH)}, {})
        assert report.as_json()["offloaded"] == {"w0": ["weights", "kv_cache"]}
        assert (asleep(made), engine.released) == ([list(BOTH)], set(BOTH))
        show_status(made.service.status())
        assert "asleep" in capsys.readouterr().out
        assert await made.pause(offload=BOTH) == report  # asked again, nothing is given up twice
        await made.resume()
        assert (asleep(made), engine.released, engine.memory_deaths) == ([[]], set(), 0)
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]
        assert (calls(engine, RELEASE, RESUME), engine.spoilt) == ([RELEASE, RESUME, RESUME], 0)


@pytest.mark.parametrize("make", [sglang, vllm])
async def test_the_cache_alone(make: Any) -> None:
    """Where the cache can be given up alone the weights stay."""
    async with make() as engine, stage(engine) as made:
        assert (await made.pause(offload=("kv_cache",))).offloaded == {"w0": ["kv_cache"]}
        report = await made.pause(offload=BOTH)  # more is asked for: it is woken first, for nothing sleeps twice
        assert (report.offloaded, report.not_offloaded) == ({"w0": list(BOTH)}, {})
        await made.resume()
        assert asleep(made) == [[]]
        await made.push(1)
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]


@pytest.mark.parametrize("make", [lambda: vllm(releases_cache=False), FakeLMDeploy])
async def test_what_goes_together_is_told(make: Any) -> None:
    """An engine that gives up all or nothing gives up more than was asked for, and the report says so."""
    async with make() as engine, stage(engine) as made:
        assert (await made.pause(offload=("kv_cache",))).offloaded == {"w0": list(BOTH)}
        assert engine.asleep == set(BOTH)
        await made.resume()
        assert (asleep(made), engine.asleep) == ([[]], set())
        await made.push(1)
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ({"offload": ["disk"]}, "offload"),
        ({"offload": BOTH, "mode": "keep"}, "offload"),
        ({"offload": BOTH, "lanes": ("train",)}, "lanes"),
    ],
)
async def test_what_means_nothing_stops_nothing(how: dict[str, Any], path: str) -> None:
    """An unknown tag, frozen requests or half of an engine: refused by name, and everything runs on."""
    async with sglang() as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        with pytest.raises(BadRequest) as refused:
            await made.service.pause(**how)
        assert refused.value.detail[0]["path"] == path
        assert (made.service.state, engine.running, engine.aborts) == ("running", 1, [])


@pytest.mark.parametrize("make", [lambda: sglang({}), FakeVLLM])
async def test_an_engine_that_cannot_is_named(make: Any) -> None:
    """One engine in traffic without its switch: refused before anything is stopped, with the switch."""
    async with make() as engine, sglang() as other, stage(engine, other, pushed=1) as made:
        with pytest.raises(BadRequest, match=r"w0 at .* cannot give up memory: it needs --enable-"):
            await made.service.pause(offload=BOTH)
        assert (made.service.state, other.released) == ("running", set())


async def test_an_engine_that_is_not_idle_is_left_alone() -> None:
    """What an abort does not stop holds its engine's memory: nobody asks for it, and the report says why."""
    async with sglang() as engine, sglang() as idle, stage(engine, idle, pushed=2) as made:
        await engine.wait_running(1)
        engine.answer = lambda _: Hang()
        engine.lose_aborts = True
        report = await made.pause(1.0, offload=BOTH)
        assert report.offloaded == {"w1": list(BOTH)}
        assert "QUARANTINED" in report.not_offloaded["w0"]
        assert (engine.count(RELEASE), engine.memory_deaths) == (0, 0)
        engine.lose_aborts = False


async def test_an_engine_that_counts_a_strangers_request_is_left_alone() -> None:
    """Idle is what the engine's own count says, asked right before its memory is."""
    async with sglang() as engine, stage(engine) as made:
        engine.loads = (1, 0)
        report = await made.pause(1.0, offload=BOTH)
        assert (report.offloaded.get("w0", []), engine.count(RELEASE)) == ([], 0)
        assert report.not_offloaded["w0"]
        engine.loads = None


async def test_weights_are_loaded_between_the_two() -> None:
    """An update wakes the weights, loads, and leaves the cache asleep until the resume."""  # P24
    for make in (lambda: sglang(SAVER), vllm):
        engine: Any = make()
        async with engine, stage(engine) as made:
            await made.pause(offload=BOTH)
            answer = await made.service.update_weights(1, DISK)
            assert answer["workers"]["w0"] == {"ok": True, "version": 1}
            assert (asleep(made), made.service.state) == ([["kv_cache"]], "paused")
            await made.resume()
            assert asleep(made) == [[]]
            await made.push(1)
            await engine.wait_running(1)
            engine.release(tokens=[1])
            assert (await made.take())["groups"]
            assert getattr(engine, "spoilt", 0) == getattr(engine, "memory_deaths", 0) == 0


async def test_an_update_that_makes_its_own_pause() -> None:
    """`pause` of an update takes `offload` as well, and everything is awake when it is over."""
    async with sglang(SAVER) as engine, stage(engine, pushed=1) as made:
        await engine.wait_running(1)
        await made.service.update_weights(1, DISK, {"offload": BOTH})
        assert (made.service.state, asleep(made), engine.memory_deaths) == ("running", [[]], 0)
        await engine.wait_running(1)
        engine.release(tokens=[1])
        assert (await made.take())["groups"]
        assert engine.spoilt == 0


async def test_weights_that_were_not_kept_are_never_served() -> None:
    """Without an update an engine that kept no weights is out of traffic, named, until it is given some."""  # P24
    async with sglang(SAVER) as engine, sglang() as other, stage(engine, other) as made:
        await made.pause(offload=BOTH)
        await made.resume()
        worker = made.worker()
        assert (worker.state, "weights were given up" in worker.reason) == (WorkerState.QUARANTINED, True)
        await made.push(1)
        await other.wait_running(1)
        await made.service.update_weights(1, DISK, {})
        await made.until(lambda: worker.state is WorkerState.ACTIVE, "back with weights")
        assert engine.spoilt == 0


async def test_weights_moved_into_a_sleeper_are_not_believed() -> None:
    """Nobody can have written to weights that are not there: 409, and nothing is labelled."""
    async with sglang() as engine, stage(engine) as made:
        await made.pause(offload=BOTH)
        with pytest.raises(Conflict) as refused:
            await made.service.update_weights(1, {"kind": "external"})
        assert (refused.value.type, engine.weight_version) == ("asleep", "0")
        await made.resume()


@pytest.mark.parametrize("named", [False, True])
async def test_weights_that_are_lost_come_back_by_the_word_of_who_moved_them(named: bool) -> None:
    """A label is no proof of weights that an engine gave up: the trainer says of it that it has been given some."""
    async with sglang(SAVER) as engine, stage(engine) as made:
        await made.pause(offload=BOTH)
        engine.fail_update = True
        with pytest.raises(NotNow):
            await made.service.update_weights(1, DISK)  # its memory is back, and nothing in it
        engine.fail_update = False
        source: dict[str, Any] = {"kind": "external"} | ({"workers": ["w0"]} if named else {})
        assert (await made.service.update_weights(1, source))["workers"]["w0"]["ok"]
        worker = made.worker()
        assert worker.weights_lost is not named
        await made.resume()
        assert (worker.state is WorkerState.ACTIVE) == named


async def test_one_that_does_not_wake_is_out_and_tried_again() -> None:
    """The gate never opens to a sleeping engine; the others go on, and it comes back when it wakes."""
    async with vllm() as engine, sglang() as other, stage(engine, other) as made:
        await made.pause(offload=BOTH)
        engine.script("/wake_up", Status(500))
        await made.resume()
        worker = made.worker()
        assert (worker.state, "does not wake" in worker.reason) == (WorkerState.QUARANTINED, True)
        assert made.service.state == "running"
        await made.until(lambda: worker.state is WorkerState.ACTIVE, "woken by its supervisor")
        assert (asleep(made), engine.asleep) == ([[], []], set())


async def test_memory_of_unknown_fate_is_neither_asked_for_nor_used() -> None:
    """Either guess may end an SGLang: it stays out until it is another process, which is awake."""
    async with sglang() as engine, sglang() as other, stage(engine, other) as made:
        engine.script(RELEASE, Status(500))
        report = await made.pause(offload=BOTH)
        assert (report.offloaded["w0"], "500" in report.not_offloaded["w0"]) == ([], True)
        await made.resume()
        worker = made.worker()
        assert "not known" in worker.reason
        assert (worker.state, engine.count(RESUME)) == (WorkerState.QUARANTINED, 0)
        await engine.kill()
        await engine.restart()
        await made.until(lambda: worker.state is WorkerState.ACTIVE, "let in as another process")
        assert engine.memory_deaths == 0


async def test_weights_that_an_engine_refused_to_give_up_are_not_lost() -> None:
    """It has what it had: it stays in traffic, and comes back to it, with no update between."""
    async with sglang(SAVER) as engine, stage(engine) as made:
        engine.script(RELEASE, Status(400))
        report = await made.pause(offload=BOTH)
        assert (report.offloaded["w0"], "400" in report.not_offloaded["w0"]) == ([], True)
        worker = made.worker()
        assert not worker.weights_lost
        await made.resume()
        assert worker.state is WorkerState.ACTIVE
        worker.put_in_quarantine("version", "it is looked at again")
        await made.until(lambda: worker.state is WorkerState.ACTIVE, "back")


async def test_an_engine_restarted_in_its_sleep_is_awake() -> None:
    """What it had given up it has again: asked to take it back it would die."""
    async with sglang() as engine, stage(engine) as made:
        await made.pause(offload=BOTH)
        await engine.kill()
        await made.until(lambda: made.worker().state is not WorkerState.ACTIVE, "missed")
        assert asleep(made) == [[]]
        await engine.restart()
        await made.resume()
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE, "back")
        assert (engine.memory_deaths, engine.count(RESUME)) == (0, 0)


async def test_a_sleeper_is_not_taken_for_dead() -> None:
    """LMDeploy calls itself asleep, and does so for a while after it woke: it is asked, and keeps its place."""
    async with FakeLMDeploy() as engine, stage(engine) as made:
        await made.pause(offload=BOTH)
        engine.poll_health()
        before = engine.count("/health")
        await engine.wait_hits("/health", before + 2)
        assert made.worker().state is WorkerState.ACTIVE
        await made.resume()
        await engine.wait_hits("/health", before + 4)
        assert (made.worker().state, engine.requests) == (WorkerState.ACTIVE, [])


async def test_a_stop_leaves_nobody_asleep() -> None:
    """Whoever comes next may not know that they sleep."""
    async with sglang() as engine, FakeLMDeploy() as other:
        async with stage(engine, other) as made:
            await made.pause(offload=BOTH)
            assert (engine.released, other.asleep) == (set(BOTH), set(BOTH))
        assert (engine.released, other.asleep, engine.memory_deaths) == (set(), set(), 0)


async def test_one_found_asleep_is_woken_and_its_weights_not_believed() -> None:
    """LMDeploy does not say at which level it sleeps: at level 2 its weights are gone, so it waits for some."""  # P24
    async with FakeLMDeploy() as engine:
        engine.sleep(level=2)
        async with stage(engine) as made:
            [woken] = made.of(WorkerWoken)
            assert (woken.before, woken.tags, engine.asleep) == (BOTH, (), set())
            worker = made.worker()
            assert (worker.state, "weights were given up" in worker.reason) == (WorkerState.QUARANTINED, True)
            await made.pause()
            engine.load(1)
            await made.service.update_weights(1, {"kind": "external", "workers": ["w0"]})
            await made.resume()
            await made.until(lambda: worker.state is WorkerState.ACTIVE, "in traffic with weights")
            engine.answer = lambda _: LMDeployReply(tokens=[1])
            await made.push(1)
            assert (await made.take())["groups"]
            assert engine.spoilt == 0


async def test_a_caller_that_leaves_takes_nothing_with_it() -> None:
    """The pause goes on without it, and so does the sleep."""  # P14
    async with sglang() as engine, stage(engine) as made:
        engine.script(RELEASE, Hang())
        pausing = made.start(made.pause(20.0, offload=BOTH))
        await engine.wait_hits(RELEASE, 1)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        resuming = made.start(made.resume())
        engine.heal(RELEASE)
        await resuming
        assert (asleep(made), made.service.state, engine.memory_deaths) == ([[]], "running", 0)


async def test_a_pause_does_not_wait_for_a_slow_sleeper() -> None:
    """The deadline holds: the report says that one is on its way, and the resume waits for it."""  # P8
    async with sglang() as engine, stage(engine) as made:
        engine.answer = lambda _: Reply(tokens=[1])
        engine.script(RELEASE, Hang())
        report = await made.pause(0.3, offload=BOTH)
        assert report.not_offloaded == {"w0": "it is still on its way to sleep"}
        resuming = made.start(made.resume())
        engine.heal(RELEASE)
        await resuming
        await made.push(1)
        assert (await made.take())["groups"]
        assert (asleep(made), engine.memory_deaths) == ([[]], 0)


@pytest.mark.parametrize("told", [SAVER, BACKUP])
async def test_no_history_of_pauses_kills_an_engine(told: dict[str, Any]) -> None:
    """Given up, woken, updated and restarted in any order, nothing is asked of it that it would die of."""  # P24
    rng = Random(7)
    async with sglang(told) as engine, stage(engine) as made:
        engine.answer = lambda _: Reply(tokens=[1])
        version = 0
        for _ in range(60):
            step = rng.choice(["pause", "pause", "resume", "update", "restart"])
            if step == "pause" and made.worker().state is WorkerState.ACTIVE:
                await made.pause(offload=rng.sample(BOTH, rng.randint(1, 2)))
            elif step == "resume":
                await made.resume()
            elif step == "update" and made.service.state == "paused" and made.worker().state is WorkerState.ACTIVE:
                version += 1
                await made.service.update_weights(version, DISK)
            elif step == "restart" and rng.random() < 0.2:
                await engine.kill()
                await engine.restart()
            assert engine.memory_deaths == 0
        if made.service.state == "running":
            await made.pause()
        await made.until(lambda: made.worker().state is not WorkerState.DEAD, "found again")
        await made.service.update_weights(version + 1, DISK)
        await made.resume()
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE, "in traffic")
        await made.push(1)
        assert (await made.take())["groups"]
        assert (engine.memory_deaths, engine.spoilt) == (0, 0)


async def test_weights_never_move_to_one_that_does_not_wake() -> None:
    """Out of traffic for its sleep it is skipped by the update, and loads them when it has woken."""  # P24
    async with vllm() as engine, sglang() as other, stage(engine, other) as made:
        await made.pause(offload=BOTH)
        engine.script("/wake_up", Status(500), times=None)
        answer = await made.service.update_weights(1, DISK)
        assert (answer["workers"]["w1"]["ok"], answer["workers"]["w0"]["ok"]) == (True, False)
        assert "does not wake" in answer["workers"]["w0"]["skipped"]
        assert (engine.updates, engine.dead) == ([], False)
        engine.heal("/wake_up")
        await made.resume()
        await made.until(lambda: made.worker().state is WorkerState.ACTIVE, "woken, and given the weights")
        assert (engine.weight_version, engine.dead) == ("1", False)


async def test_nobody_is_put_to_sleep_under_an_update() -> None:
    """A pause that asks for memory while weights move is told why it gets none."""  # P24
    async with sglang() as engine, stage(engine) as made:
        await made.pause()
        engine.script("/update_weights_from_disk", Hang())
        updating = made.start(made.service.update_weights(1, DISK))
        await engine.wait_hits("/update_weights_from_disk", 1)
        report = await made.pause(offload=BOTH)
        assert (report.offloaded, report.not_offloaded) == ({}, {"w0": "weights are on their way to it"})
        engine.heal("/update_weights_from_disk")
        assert (await updating)["version"] == 1
        await made.resume()
        assert engine.memory_deaths == 0
