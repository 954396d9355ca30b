"""Launched engines from a shell: what is wrong is one line, and nothing is left, however the service ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_svc import RolloutClient
from tests.support.commands import WAIT_S, run
from tests.support.processes import in_session, lives
from tests.test_cli import CONFIGS, ROOT, Served, changed, served, written

ENGINE = [sys.executable, "-m", "tests.support.launched_engine", "--port", "{port}", "--ways"]

ENV = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def launched(**launch: Any) -> dict[str, Any]:
    """A configuration with one launched engine."""
    return changed(workers=[{"launch": {"command": ["true", "{port}"]} | launch}])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            launched(command=["no-such-engine", "{port}"]),
            "workers.0.launch.command: no program 'no-such-engine' in PATH",
        ),
        (launched(command=["/no/such", "{port}"]), "workers.0.launch.command: no such program: /no/such"),
        (launched(command=["/etc/passwd", "{port}"]), "workers.0.launch.command: is not executable: /etc/passwd"),
        (launched(command=["/etc", "{port}"]), "workers.0.launch.command: is a folder: /etc"),
        (launched(log_dir="/etc/passwd/logs"), "workers.0.launch.log_dir: is no folder: /etc/passwd"),
        (launched(env=["A=1"]), "workers.0.launch.env: expected a mapping"),
        (launched(env={"A": 1}), "workers.0.launch.env.A: expected a text: write it in quotes, '1'"),
        (launched(env={"A": "${NO_SUCH_IS_SET}"}), "workers.0.launch.env.A: environment variable 'NO_SUCH_IS_SET' is"),
        (launched(port="any"), "workers.0.launch.port: expected auto, or a port from 1 to 65535"),
        (launched(host="192.0.2.1"), "workers.0.launch.host: '192.0.2.1' is no address of this machine"),
        (launched(command=["true"]), "workers.0.launch.command: has no {port}"),
        (
            changed(workers=[{"url": "http://e", "launch": {"command": ["true", "{port}"]}}]),
            "workers.0: give exactly one",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_one_line_and_exit_2(tmp_path: Path, config: Any, said: str) -> None:
    """What is wrong is said in one line with its dotted path, and nothing is started."""  # P35
    done = run("serve", "--config", written(tmp_path, config))
    [line] = done.stderr.splitlines()
    assert line.startswith(said)
    assert done.returncode == 2


async def test_a_command_that_ends_at_once_is_exit_1_with_its_words(tmp_path: Path) -> None:
    """One line with path, exit code and log, and below it the last lines of the log; a second try was made."""  # P35
    command = ["sh", "-c", "echo cannot find model >&2; exit 9", "{port}"]
    worker = {"launch": {"command": command, "log_dir": str(tmp_path / "logs")}}
    async with served(tmp_path, "--log-level", "error", workers=[worker]) as service:
        code, said = await service.ended()
    assert code == 1
    line, quoted = said.splitlines()[-2:]
    assert line.startswith(f"workers.0.launch: its process ended with exit code 9 (log: {tmp_path}/logs/w0.log); ")
    assert quoted == "    cannot find model"
    assert (tmp_path / "logs" / "w0.log").read_text().count("cannot find model") == 2


def pids_in(ways: Path) -> list[int]:
    """The numbers of the engines here, and of their children."""
    return [int(line) for line in (ways / "pids").read_text().splitlines()]


async def gone(pids: list[int]) -> None:
    """Wait until none of these runs, nor anything else in their sessions."""
    async with asyncio.timeout(WAIT_S):
        while any(map(lives, pids)) or any(map(in_session, pids)):  # noqa: ASYNC110 - processes ring no bell
            await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
async def test_nothing_is_left_of_a_service_that_was_killed(tmp_path: Path) -> None:
    """Kill -9 of the service: engines and their children, deaf to SIGTERM, are gone soon after."""
    launch = {"command": [*ENGINE, str(tmp_path)], "env": ENV, "log_dir": str(tmp_path)}
    async with served(tmp_path, workers=[{"launch": launch}, {"launch": launch}]) as service:
        await service.word("service.ready")
        pids = pids_in(tmp_path)
        assert len(pids) == 4
        assert all(map(lives, pids))
        service.process.kill()
        await service.process.wait()
        await gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
async def test_an_engine_is_launched_and_ended_over_http(tmp_path: Path) -> None:
    """With the service's token a worker may be launched; when it is removed, its process is ended."""
    launch = {"command": [*ENGINE, str(tmp_path)], "env": ENV, "log_dir": str(tmp_path)}
    async with served(tmp_path, service={"port": 0, "token": "sesame"}) as service:
        service.url = await service.word("service.ready")
        async with RolloutClient(service.url, "sesame") as client:
            added = await client.add_worker(launch=launch)
            assert added["process"]["log"] == str(tmp_path / "w0.log")
            async with asyncio.timeout(WAIT_S):
                while (await client.workers())[0]["state"] != "ACTIVE":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await client.remove_worker(added["id"])
            await gone(pids_in(tmp_path))
            assert await client.workers() == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
async def test_our_configuration_launches_engines_and_serves(tmp_path: Path) -> None:
    """`configs/launch.yaml` as it is, but for port and logs: a batch is taken, and a signal leaves nothing behind."""
    config = CONFIGS / "launch.yaml"
    logs = [f"--set=workers.{index}.launch.log_dir={tmp_path}" for index in (0, 1)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout_svc", "serve", "--config", str(config), "--set=service.port=0", *logs),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    service = Served(process)
    try:
        service.url = await service.word("service.ready")
        async with RolloutClient(service.url) as client:
            assert len((await client.take_batch(0, 8, WAIT_S))["groups"]) == 8
            processes = [worker["process"] for worker in await client.workers()]
        assert [Path(each["log"]) for each in processes] == [tmp_path / "w0.log", tmp_path / "w1.log"]
        process.send_signal(signal.SIGTERM)
        code, _ = await service.ended()
        assert code == 0
        pids = [each["pid"] for each in processes]
        assert not any(map(lives, pids))
        assert not any(map(in_session, pids))
        assert "engine.ready" in (tmp_path / "w0.log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
