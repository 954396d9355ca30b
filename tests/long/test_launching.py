"""Engines that the service starts itself: real processes, started, watched, restarted and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollout_svc.config import WorkerConfig
from rollout_svc.engines import EngineInfo
from rollout_svc.errors import BadRequest, ConfigError, NotNow
from rollout_svc.events import EngineExited, EnginesLoading, EngineStarted, RequestAborted, WorkerChanged
from rollout_svc.launching import policy
from rollout_svc.service import RolloutService
from rollout_svc.startup import StartFailed
from rollout_svc.workers.launched import Launched
from rollout_svc.workers.worker import Worker, WorkerState
from tests.support.bell import WAIT_S
from tests.support.fake_sglang import FakeSGLang
from tests.support.processes import lives
from tests.support.stage import Stage, make_config, stage

ROOT = Path(__file__).parent.parent.parent
SOON_S = 1.0
"""Well before three pings were lost."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart after a tenth of the time."""
    monkeypatch.setattr(policy, "BASE_S", 0.1)


def engine(ways: Path, **launch: Any) -> dict[str, Any]:
    """The settings of a launched engine that behaves as the files in a folder say."""
    ways.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.launched_engine", "--port", "{port}", "--ways", str(ways)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    defaults: dict[str, Any] = {"command": command, "env": {"PYTHONPATH": path}, "log_dir": str(ways / "logs")}
    return {"launch": defaults | launch, "dialect": "sglang", "max_batch": 8}


def pids(ways: Path) -> list[int]:
    """Every process that was an engine here, and its children."""
    return [int(line) for line in (ways / "pids").read_text().splitlines()]


def read(log: str) -> str:
    """What is in a log."""
    return Path(log).read_text()


def pid_of(worker: Worker) -> int:
    assert worker.launched is not None
    assert worker.launched.pid is not None
    return worker.launched.pid


def port_of(worker: Worker) -> int:
    return urlsplit(worker.endpoint.url).port or 0


def log_of(ways: Path, worker_id: str = "w0") -> str:
    return str(ways / "logs" / f"{worker_id}.log")


async def until(made: Stage, holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds, processes included, which ring no bell; the books are checked each time."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                made.audit()
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {WAIT_S} s: {what}; {made.service.workers()}; {made.of(EngineExited)}")


async def test_a_launched_engine_serves_and_ends_with_the_service(tmp_path: Path) -> None:
    """It is started, reached, given work; at the end it and its deaf child are gone, its log is kept."""
    async with stage(engine(tmp_path), pushed=4) as made:
        assert len((await made.take(groups=4))["groups"]) == 4
        [record] = made.service.workers()
        assert record["process"] == {"pid": pid_of(made.worker()), "starts": 1, "log": log_of(tmp_path)}
        assert lives(record["process"]["pid"])
        [started] = made.of(EngineStarted)
        assert (started.worker, started.url, started.starts) == ("w0", record["url"], 1)
    assert not any(map(lives, pids(tmp_path)))
    assert len(pids(tmp_path)) == 2
    assert read(log_of(tmp_path)).startswith("--- started at ")
    assert not made.of(EngineExited)


async def test_an_exit_is_known_at_once_and_the_engine_comes_back(tmp_path: Path) -> None:
    """P19: its worker is DEAD, with reason and log, before a ping is lost; its requests move; it returns to traffic."""
    one, two = tmp_path / "one", tmp_path / "two"
    async with stage(engine(one), engine(two)) as made:
        first, second = made.worker(0), made.worker(1)
        port, pid = port_of(first), pid_of(first)
        for ways in (one, two):
            (ways / "hold").touch()
        await made.push(8)
        await until(made, lambda: bool(first.calls and second.calls), "both work")
        moved = len(first.calls)
        (one / "load").touch()
        loop = asyncio.get_running_loop()
        killed = loop.time()
        os.kill(pid, signal.SIGKILL)
        await until(made, lambda: bool(made.of(EngineExited)), "its end is known")
        assert loop.time() - killed < SOON_S
        assert not first.calls
        deaths = [event for event in made.of(WorkerChanged) if event.after == "DEAD"]
        assert len(deaths) == 1
        assert len([event for event in made.of(RequestAborted) if event.reason == "worker_dead"]) <= moved
        [exited] = made.of(EngineExited)
        assert (exited.how, exited.log, exited.last_words) == ("was ended by SIGKILL", log_of(one), "")
        (two / "hold").unlink()
        await until(made, lambda: first.state is WorkerState.STARTING, "it is started again")
        assert not first.calls
        (one / "hold").unlink()
        (one / "load").unlink()
        await until(made, lambda: first.state is WorkerState.ACTIVE, "it is back")
        assert port_of(first) == port
        assert pid_of(first) != pid
        assert first.breaker.state == "closed"  # a full share at once: the faults were the other process's
        assert first.launched is not None
        assert first.launched.starts == 2
        await made.push(8, first=8)
        await until(made, lambda: first.answered > 0, "it answers")


async def test_an_engine_whose_port_was_taken_comes_back_elsewhere(tmp_path: Path) -> None:
    """Somebody else listens where it was: it gets another port, and traffic there; the other is asked nothing."""
    async with stage(engine(tmp_path), pushed=2) as made:
        worker = made.worker()
        await made.take(groups=2)
        port = port_of(worker)
        (tmp_path / "refuse").touch()  # the first restart fails, which gives the other time to take the port
        os.kill(pid_of(worker), signal.SIGKILL)
        await until(made, lambda: len(made.of(EngineExited)) == 2, "it failed to start")
        async with FakeSGLang() as other:
            await other.refuse()
            other.port = port
            await other.listen()
            (tmp_path / "refuse").unlink()
            await until(made, lambda: worker.state is WorkerState.ACTIVE, "it is back")
            assert port_of(worker) != port
            assert not other.hits
            await made.push(2, first=2)
            assert len((await made.take(step=1, groups=2))["groups"]) == 2


async def test_a_command_that_ends_at_once_fails_the_start(tmp_path: Path) -> None:
    """P35: the error has the place in the configuration, the exit code, the log, and its last lines."""
    tmp_path.joinpath("refuse").touch()
    async with stage(engine(tmp_path), ready=False) as made:
        with pytest.raises(StartFailed) as failed:
            await made.service.ready()
        first, *quoted = str(failed.value).splitlines()
        assert first.startswith(f"workers.0.launch: its process ended with exit code 3 (log: {log_of(tmp_path)}); ")
        assert quoted == ["    there is no such model"]
        assert [event.last_words for event in made.of(EngineExited)] == ["there is no such model"] * 2
        assert made.of(EngineExited)[-1].restart_in_s is None
        assert made.worker().state is WorkerState.DEAD


async def test_a_log_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    """P35: what was a folder when the configuration was read is none any more: the start says which."""
    settings = engine(tmp_path)
    async with stage(settings, ready=False) as made:
        tmp_path.joinpath("logs").touch()
        with pytest.raises(StartFailed, match=r"could not be started: .*/logs: File exists"):
            await made.service.ready()
        assert not made.of(EngineStarted)


async def test_an_engine_that_loads_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer for as long as it likes; progress names its log; only the end of its process restarts it."""
    monkeypatch.setattr("rollout_svc.startup._PROGRESS_S", 0.1)
    tmp_path.joinpath("load").touch()
    async with stage(engine(tmp_path), pushed=1, ready=False) as made:
        ready = made.start(made.service.ready())
        await until(made, lambda: len(made.of(EnginesLoading)) > 5, "progress is told")
        assert f"(log: {log_of(tmp_path)})" in made.of(EnginesLoading)[-1].waiting["w0"]
        assert made.worker().state is WorkerState.STARTING
        tmp_path.joinpath("load").unlink()
        await ready
        assert len(made.of(EngineStarted)) == 1
        await made.take()


async def test_a_worker_whose_restarts_are_used_up_stays_dead(tmp_path: Path) -> None:
    """P23: it says so, with exit code and log, and whoever listens at its port by then is not taken for it."""
    async with stage(engine(tmp_path, restarts=0), pushed=1) as made:
        await made.take()
        worker = made.worker()
        port = port_of(worker)
        os.kill(pid_of(worker), signal.SIGTERM)
        await until(made, lambda: bool(made.of(EngineExited)), "its end is known")
        assert made.of(EngineExited)[0].restart_in_s is None
        assert worker.state is WorkerState.DEAD
        assert worker.reason == (
            f"its process ended with exit code 0 (log: {log_of(tmp_path)}); its 0 restarts in 3600 s are used up"
        )
        async with FakeSGLang() as other:
            await other.refuse()
            other.port = port
            await other.listen()
            report = await made.pause()
            assert report.clean
            await made.resume()
            worker.attention.set()
            await made.push(1, first=1)
            with pytest.raises(NotNow):
                await made.take(step=1, timeout_s=0.3)
            assert not other.hits
        await made.service.remove_worker("w0")
        await until(made, lambda: not made.service.workers(), "it is forgotten")


async def test_workers_are_launched_and_ended_while_the_service_runs(tmp_path: Path) -> None:
    """One that is added is started; one that is removed finishes what it runs, and then its process ends."""
    async with stage() as made:
        added = await made.service.add_worker(WorkerConfig.model_validate(engine(tmp_path)))
        worker = made.parts.pool.workers[added["id"]]
        await until(made, lambda: worker.state is WorkerState.ACTIVE, "it is in traffic")
        (tmp_path / "hold").touch()
        await made.push(1)
        await until(made, lambda: bool(worker.calls), "it works")
        await made.service.remove_worker(added["id"])
        pid = pid_of(worker)
        await made.pause(mode="abort")
        await until(made, lambda: not made.service.workers(), "it is forgotten")
        await until(made, lambda: not any(map(lives, pids(tmp_path))), "its processes are gone")
        assert pid in pids(tmp_path)
        assert not made.of(EngineExited)


async def test_a_worker_removed_between_two_processes_gets_no_third(tmp_path: Path) -> None:
    """What waits for its restart when it is removed is not started."""
    async with stage(engine(tmp_path), engine(tmp_path / "other")) as made:
        os.kill(pid_of(made.worker()), signal.SIGKILL)
        await until(made, lambda: bool(made.of(EngineExited)), "its end is known")
        await made.service.remove_worker("w0")
        await until(made, lambda: len(made.service.workers()) == 1, "it is forgotten")
        await until(
            made, lambda: not any("launch:w0" in t.get_name() for t in made.parts.tasks.live), "nobody keeps it"
        )
        assert len(made.of(EngineStarted)) == 2


async def test_two_workers_may_launch_the_same_command(tmp_path: Path) -> None:
    """Each has a port and a log of its own."""
    settings = engine(tmp_path)
    async with stage(settings, settings, pushed=4) as made:
        assert len((await made.take(groups=4))["groups"]) == 4
        assert len({port_of(made.worker(0)), port_of(made.worker(1))}) == 2
        assert read(log_of(tmp_path, "w1"))
    assert not any(map(lives, pids(tmp_path)))


async def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """P35: at its place in the configuration, and in a body."""
    async with FakeSGLang() as other:
        settings = engine(tmp_path, port=other.port)
        service = RolloutService(make_config(settings))
        with pytest.raises(
            ConfigError, match=rf"^workers\.0\.launch\.port: port {other.port} on 127\.0\.0\.1 is in use$"
        ):
            await service.start()
        await service.stop()
        async with stage() as made:
            with pytest.raises(BadRequest, match=r"^launch\.port: "):
                await made.service.add_worker(WorkerConfig.model_validate(settings))
            settings["launch"] |= {"command": ["/no/such", "{port}"], "host": "192.0.2.1"}
            with pytest.raises(BadRequest, match=r"^launch\.command: no such program.*launch\.host: "):
                await made.service.add_worker(WorkerConfig.model_validate(settings))
            assert not made.service.workers()
    assert not (tmp_path / "pids").exists()


async def test_a_service_that_stops_starts_nothing_any_more(tmp_path: Path) -> None:
    """An engine that ends while the service drains is not started again."""
    async with stage(engine(tmp_path), pushed=1) as made:
        await made.take()
        stopping = made.start(made.service.stop())
        os.kill(pid_of(made.worker()), signal.SIGKILL)
        await stopping
        assert len(made.of(EngineStarted)) == 1
    assert not any(map(lives, pids(tmp_path)))


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_a_process_that_ends_during_a_pause_has_nothing_left(tmp_path: Path, mode: str) -> None:
    """P8, P9: the pause comes back in time and clean, for what does not run holds nothing; later all goes on."""
    async with stage(engine(tmp_path)) as made:
        worker = made.worker()
        (tmp_path / "hold").touch()
        await made.push(3)
        await until(made, lambda: len(worker.calls) == 3, "it works")
        pausing = made.start(made.pause(mode=mode, deadline_s=3.0))
        if mode == "keep":
            await pausing
        os.kill(pid_of(worker), signal.SIGKILL)
        report = await pausing
        assert report.clean
        await until(made, lambda: bool(made.of(EngineExited)), "its end is known")
        await until(made, lambda: not worker.calls and worker.freeze is None, "it holds nothing")
        assert (await made.pause()).clean
        (tmp_path / "hold").unlink()
        await made.resume()
        await until(made, lambda: worker.state is WorkerState.ACTIVE, "it is back")
        assert len((await made.take(groups=3))["groups"]) == 3


async def test_an_engine_comes_back_with_the_weights_of_the_fleet(tmp_path: Path) -> None:
    """P19: a process that starts with the first weights is given the current ones before it sees traffic."""
    async with stage(engine(tmp_path), pushed=1) as made:
        await made.take()
        worker = made.worker()
        source = {"kind": "disk", "path": str(tmp_path)}
        await made.service.update_weights(1, source, pause={"deadline_s": 2.0})
        assert worker.version == 1
        os.kill(pid_of(worker), signal.SIGKILL)
        await made.push(1, first=1)
        batch = await made.take(step=1)
        spans = batch["groups"][0]["samples"][0]["weight_versions"]
        assert {span["version"] for span in spans} == {1}
        assert worker.launched is not None
        assert worker.launched.starts == 2


async def test_one_whose_process_ended_while_it_answered_is_not_let_in() -> None:
    """Its last answers were good, and are nobody's any more: it gets no traffic before the next one answers."""  # P19
    async with FakeSGLang(weight_version="0") as there, stage(there) as made:
        worker = made.worker()
        worker.launched = Launched("engine.log")
        worker.become(WorkerState.STARTING, "its process is started again")
        await made.parts.supervisor._let_in(worker, EngineInfo("0"))
        assert (worker.absent, worker.state) == (True, WorkerState.STARTING)


async def test_an_engine_of_ours_whose_weights_are_of_no_version_is_started_again(tmp_path: Path) -> None:
    """P24: it did not answer while it loaded: ended at once, and in traffic again with what the fleet has."""
    tmp_path.joinpath("stall").touch()
    async with stage(engine(tmp_path), weights={"update_timeout_s": 0.2}) as made:
        worker = made.worker()
        first = pid_of(worker)
        (tmp_path / "stall").unlink()
        with pytest.raises(NotNow) as refused:
            await made.service.update_weights(1, {"kind": "disk", "path": "/w"}, pause={})
        assert not refused.value.detail["workers"]["w0"]["ok"]
        await until(made, lambda: worker.launched is not None and worker.launched.starts == 2, "it is started again")
        await until(made, lambda: worker.state is WorkerState.ACTIVE, "it is back")
        assert not lives(first)
        assert (worker.version, made.service.state) == (0, "paused")
        await made.resume(weight_version=0)
        await made.push(1)
        assert len((await made.take())["groups"]) == 1
