"""The command line as a shell sees it: exit codes, one readable line per problem, and signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.commands import WAIT_S, run
from tests.support.fake_sglang import FakeSGLang

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
CONFIG: dict[str, Any] = {
    "service": {"port": 0},
    "tasks": [{"name": "t", "prompts": {"push": True}}],
    "trainer": {"train_batch_size": 4, "prompt_repeat_k": 1},
    "pause": {"deadline_s": 2.0},
}


def written(folder: Path, config: Any) -> Path:
    """Write a configuration: data as YAML, text as it is."""
    path = folder / "config.yaml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return path


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def changed(**sections: Any) -> dict[str, Any]:
    """The good configuration with other sections."""
    return CONFIG | sections


def task(**keys: Any) -> dict[str, Any]:
    """The good configuration with another task."""
    return changed(tasks=[CONFIG["tasks"][0] | keys])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("service: {port: 1\ntasks: ]", "config.yaml:2:"),
        ("service: {port: 1, port: 2}", "given twice"),
        ("- a list", "expected a mapping"),
        (changed(servce={}), "servce: unknown key"),
        ("service: {port: 2024-13-45}", "config.yaml:1:17: '2024-13-45' is no timestamp: "),
        ("service: &again {port: *again}", "config.yaml:1:24: anchor 'again' is used inside itself"),
        (changed(service={"port": "8700"}), "service.port: "),
        (changed(service={"host": "0.0.0.0", "port": 0}), "service.host: binding '0.0.0.0', beyond loopback"),
        (changed(tasks=[]), "tasks: "),
        (changed(workers=[{"url": "engine:30000"}]), "workers.0.url: "),
        (changed(workers=[{"url": "http://e", "api_key": "${NO_SUCH_KEY_IS_SET}"}]), "workers.0.api_key: "),
        (changed(trainer={"train_batch_size": 0}), "trainer.train_batch_size: "),
        (
            changed(workers=[{"url": "http://e"}], trainer={"train_batch_size": 10**6, "prompt_repeat_k": 10**6}),
            "trainer.train_batch_size: ",
        ),
        (changed(trainer={"file": "none.yaml"}), "trainer.file: "),
        (task(prompts={"jsonl": "none.jsonl"}), "tasks.0.prompts.jsonl: no such file"),
        (task(prompts={"source": "no.such:thing"}), "tasks.0.prompts.source: "),
        (task(agent={"name": "nobody"}), "tasks.0.agent.name: no agent named 'nobody'"),
        (task(agent={"path": "tests.support.loops:Nobody"}), "tasks.0.agent"),
        (task(judger={"name": "nobody"}), "tasks.0.judger.name: no judger named 'nobody'"),
        (task(judger={"name": "exact", "stripp": True}), "tasks.0.judger"),
        (task(sampling={"max_tokens": 0}), "tasks.0.sampling.max_tokens: "),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(tmp_path: Path, config: Any, said: str) -> None:
    """What is wrong is said in one line with its dotted path, nothing is started, and no traceback is shown."""  # P35
    done = run("serve", "--config", written(tmp_path, config))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_conversations_without_a_template_are_refused_before_the_start(tmp_path: Path) -> None:
    """`--dry-run` tells of a file whose messages could never become tokens, at the setting to blame."""  # P35
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    config = written(tmp_path, task(prompts={"jsonl": "p.jsonl"}) | {"tokenizer": {"path": "bytes"}})
    done = run("serve", "--config", config, "--dry-run")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("tokenizer.chat_template: p.jsonl:1: messages: ")
    template = "tokenizer.chat_template={% for m in messages %}{{ m.content }}{% endfor %}"
    done = run("serve", "--config", config, "--dry-run", "--set", template.replace("=", "='", 1) + "'")
    assert done.returncode == 0


def test_every_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    """Three faults, three lines, in one run."""  # P35
    config = changed(service={"port": -1}, trainer={"train_batch_size": 0}, typo=1)
    done = run("serve", "--config", written(tmp_path, config))
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "service.port",
        "trainer.train_batch_size",
        "typo",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "--config", "/no/such/file.yaml"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--set", "trainer.train_batch_size"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--set", "trainer.typo=1"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--log-level", "loud"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--log-level", "warn"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--log-level", "critical"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--set", "service.port=2024-13-45"),
        ("serve", "--config", CONFIGS / "quickstart.yaml", "--set", "service=&a [*a]"),
        ("plan", "--trainer", "/no/such/file.yaml", "--workers", "1"),
        ("plan", "--trainer", CONFIGS / "trainer-example.yaml", "--workers", "-1"),
        ("status", "--url", "nope"),
        ("engine", "--port", "99999"),
        ("engine", "--port", "-1"),
        ("dance",),
    ],
)
def test_bad_usage_is_exit_2(arguments: tuple[object, ...]) -> None:
    """Bad commands, options and files end with 2, and a word about why."""  # P35
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_each_configuration_of_ours_is_good(name: str) -> None:
    """`--dry-run` shows the resolved settings and the plan, and starts nothing."""
    done = run("serve", "--config", CONFIGS / name, "--dry-run", env={"SGLANG_API_KEY": "x", "SGLANG_ADMIN_KEY": "y"})
    assert (done.returncode, done.stderr) == (0, "")
    resolved, plan = done.stdout.split("# concurrency plan")
    assert yaml.safe_load(resolved)["tasks"]
    assert {line.partition(":")[0] for line in plan.split("\n") if line} >= {"workers", "required", "allowed"}


def test_overrides_reach_the_configuration() -> None:
    """`--set` changes one value; secrets are not shown."""
    overrides = ["--set", "trainer.train_batch_size=48", "--set", "service.token=hush"]
    done = run("serve", "--config", CONFIGS / "quickstart.yaml", "--dry-run", *overrides)
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout.partition("#")[0])["trainer"]["train_batch_size"] == 48
    assert "hush" not in done.stdout


@pytest.mark.parametrize("instead", ["--dry-run", "--preflight"])
def test_nothing_is_restored_where_nothing_starts(instead: str) -> None:
    """A snapshot that would not be looked at is refused: exit 2, one line."""
    done = run("serve", "--config", CONFIGS / "quickstart.yaml", "--restore", "no-such-snapshot", instead)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"--restore: makes a journal, and {instead} starts nothing: give one\n"


def test_a_dry_run_shows_what_may_be_under_way() -> None:
    """Strategy, limit and window at the start; what can never work is refused with its arithmetic, exit 2."""  # P32
    config = ("serve", "--config", CONFIGS / "quickstart.yaml", "--dry-run")
    batch = ("--set", "trainer.train_batch_size=10", "--set", "trainer.over_sample_threshold=0.3")
    shown = run(*config, *batch, "--set", "producer.strategy=disaggregated", "--set", "trainer.max_staleness=2").stdout
    schedule = shown.partition("# schedule")[2]
    assert "disaggregated" in schedule
    assert "30 groups out: batches of 10, 3 more for oversampling" in schedule
    assert "3 batches" in schedule
    shown = run(*config, *batch, "--set", "producer.strategy=sync").stdout
    assert "10 groups out: batches of 10\n" in shown
    refused = run(*config, "--set", "trainer.update_interval=4", "--set", "trainer.max_staleness=1")
    assert refused.returncode == 2
    assert refused.stderr.startswith("trainer.max_staleness: with update_interval 4")
    assert len(refused.stderr.splitlines()) == 1


def test_the_plan_as_json() -> None:
    """`plan --json` prints the plan record alone."""
    done = run("plan", "--trainer", CONFIGS / "trainer-example.yaml", "--workers", "8", "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert set(plan) == {"workers", "required", "allowed", "ratio", "max_groups", "warnings"}
    assert (plan["workers"], plan["required"], plan["allowed"]) == (8, 77, 308)


def test_a_service_that_is_not_there_is_exit_1() -> None:
    """`status` without a service says where it looked."""
    url = f"http://127.0.0.1:{free_port()}"
    done = run("status", "--url", url)
    assert done.returncode == 1
    assert url in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- a service that runs -------------------------------------------------------------------------------------


class Served:
    """A service in a process of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = ""

    async def word(self, name: str) -> str:
        """Wait for a line on stdout, and give what follows."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(name):
                    return line.partition("url=")[2].strip()
        raise AssertionError(f"it ended without {name}: {await self.errors()}")

    async def errors(self) -> str:
        """What it said on stderr, to its end."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def logged(self, event: str) -> dict[str, Any]:
        """Wait for a line of the log."""
        assert self.process.stderr is not None
        async with asyncio.timeout(WAIT_S):
            while line := await self.process.stderr.readline():
                told: dict[str, Any] = json.loads(line)
                if told["event"] == event:
                    return told
        raise AssertionError(f"it ended without {event}")

    async def ended(self) -> tuple[int, str]:
        """Wait for its end: exit code and stderr."""
        async with asyncio.timeout(WAIT_S):
            said = await self.errors()
            return await self.process.wait(), said

    async def status(self) -> dict[str, Any]:
        """Ask for its status."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "/v1/status") as response:
            answer: dict[str, Any] = await response.json()
            return answer


@asynccontextmanager
async def served(folder: Path, *arguments: str, **sections: Any) -> AsyncIterator[Served]:
    """Start `serve`; it is killed at the end if the test did not end it."""
    path = written(folder, changed(**sections))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout_svc", "serve", "--config", str(path), *arguments), stdout=PIPE, stderr=PIPE
    )
    made = Served(process)
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    """What runs is aborted at the engines, the port is given back, and the exit code is 0."""
    async with FakeSGLang(weight_version="0") as engine, served(tmp_path, workers=[{"url": engine.url}]) as service:
        service.url = await service.word("service.ready")
        body = {"task": "t", "prompts": [{"input_ids": [1]}, {"input_ids": [2]}]}
        async with aiohttp.ClientSession() as session, session.post(service.url + "/v1/prompts", json=body) as put:
            assert (await put.json()) == {"accepted": 2}
        await engine.wait_running(2)
        service.process.send_signal(number)
        code, _ = await service.ended()
        assert code == 0
        assert engine.aborts == [{"abort_all": True}]
        assert not engine.live


async def test_the_second_signal_exits_at_once(tmp_path: Path) -> None:
    """While the first one still waits for an engine that does not stop, the second ends the process."""
    async with (
        FakeSGLang(weight_version="0") as engine,
        served(tmp_path, workers=[{"url": engine.url}], pause={"deadline_s": 600.0}) as service,
    ):
        service.url = await service.word("service.ready")
        body = {"task": "t", "prompts": [{"input_ids": [1]}]}
        async with aiohttp.ClientSession() as session, session.post(service.url + "/v1/prompts", json=body):
            pass
        await engine.wait_running(1)
        engine.lose_aborts = True
        service.process.send_signal(signal.SIGINT)
        await engine.wait_aborts(1)
        service.process.send_signal(signal.SIGINT)
        code, _ = await service.ended()
        assert code == 130


async def test_a_signal_while_engines_load_exits_0(tmp_path: Path) -> None:
    """Nobody has to wait for engines that do not come."""
    async with served(tmp_path, workers=[{"url": f"http://127.0.0.1:{free_port()}"}]) as service:
        service.url = await service.word("service.listening")
        assert (await service.status())["state"] == "starting"
        service.process.send_signal(signal.SIGINT)
        code, _ = await service.ended()
        assert code == 0


async def test_engines_that_do_not_answer_are_named_and_exit_1(tmp_path: Path) -> None:
    """At `start_timeout_s` the silent ones are named with their addresses, in one line, and the exit code is 1."""
    silent = f"http://127.0.0.1:{free_port()}"
    async with FakeSGLang(weight_version="0") as engine:
        workers = [{"url": engine.url}, {"url": silent}]
        async with served(tmp_path, "--log-level", "error", workers=workers, start_timeout_s=0.7) as service:
            code, said = await service.ended()
            assert code == 1
            [line] = said.splitlines()
            assert "w1" in line
            assert silent in line
            assert "w0" not in line


async def test_a_port_in_use_starts_nothing(tmp_path: Path) -> None:
    """Exit 2 with the setting named, and no engine was asked anything."""  # P35
    async with FakeSGLang(weight_version="0") as engine:
        port = {"port": engine.port}
        async with served(tmp_path, service=port, workers=[{"url": engine.url}]) as service:
            code, said = await service.ended()
            assert code == 2
            assert said.startswith("service.port: cannot bind 127.0.0.1:")
            assert len(said.splitlines()) == 1
            assert not engine.hits


async def test_a_service_whose_producer_dies_exits_1(tmp_path: Path) -> None:
    """A part that must live ended: the process says so and ends with 1."""  # P23
    tasks = [{"name": "t", "prompts": {"source": "tests.support.sources:breaks"}, "judger": {"name": "exact"}}]
    async with (
        FakeSGLang(weight_version="0") as engine,
        served(tmp_path, workers=[{"url": engine.url}], tasks=tasks) as service,
    ):
        await engine.wait_hits("/model_info", 1)
        code, said = await service.ended()
        assert code == 1
        assert "the source is broken" in said


async def test_a_source_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """SIGTERM ends a service with 0 while its source is blocked for good."""
    tasks = [{"name": "t", "prompts": {"source": "tests.support.sources:never"}, "judger": {"name": "exact"}}]
    async with (
        FakeSGLang(weight_version="0") as engine,
        served(tmp_path, workers=[{"url": engine.url}], tasks=tasks) as service,
    ):
        await service.word("service.ready")
        service.process.send_signal(signal.SIGTERM)
        code, _ = await service.ended()
        assert code == 0


KEPT = ("--mode", "keep", "--lane", "train")
"""A freeze holds every lane of an engine."""


async def test_pause_and_resume_from_a_shell(tmp_path: Path) -> None:
    """`status`, `pause` and `resume` with `--json` print the API's records; an old ticket is exit 1, bad usage 2."""
    async with FakeSGLang(weight_version="0") as engine, served(tmp_path, workers=[{"url": engine.url}]) as service:
        url = await service.word("service.ready")
        status = await asyncio.to_thread(run, "status", "--url", url, "--json")
        assert json.loads(status.stdout)["state"] == "running"
        report = await asyncio.to_thread(run, "pause", "--url", url, "--deadline-s", "2", "--json")
        assert (json.loads(report.stdout)["ticket"], json.loads(report.stdout)["clean"]) == (1, True)
        shown = await asyncio.to_thread(run, "status", "--url", url)
        assert (shown.returncode, "paused" in shown.stdout) == (0, True)
        for age in ("-1", "nan"):
            done = await asyncio.to_thread(run, "stuck", "--url", url, "--older-than", age)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        for refused in (("--deadline-s", "0"), ("--mode", "stop"), ("--lane", "slow"), ("--offload", "disk"), KEPT):
            done = await asyncio.to_thread(run, "pause", "--url", url, *refused)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        old = await asyncio.to_thread(run, "resume", "--url", url, "--ticket", "7")
        assert old.returncode == 1
        assert len(old.stderr.splitlines()) == 1
        resumed = await asyncio.to_thread(run, "resume", "--url", url, "--json")
        assert json.loads(resumed.stdout)["state"] == "running"
