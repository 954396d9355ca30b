"""`serve --preflight` as a shell sees it, over real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run
from tests.test_cli import CONFIG, free_port, written


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """Run two built-in engines of different contexts; gives their addresses."""
    command = (sys.executable, "-m", "rollout_svc.embedded", "--port", "0", "--die-with-parent", "--context")
    running = [subprocess.Popen((*command, size), stdout=subprocess.PIPE, text=True) for size in ("64", "128")]
    try:
        yield [str(process.stdout.readline()).partition("url=")[2].strip() for process in running if process.stdout]
    finally:
        for process in running:
            process.kill()
            process.communicate()


def preflight(folder: Path, urls: list[str], *arguments: str, **sections: Any) -> tuple[int, str, str]:
    """Run it over engines; exit code, stdout, stderr."""
    sampling = {"max_tokens": sections.pop("max_tokens", 16)}
    task = CONFIG["tasks"][0] | {"sampling": sampling}
    path = written(folder, CONFIG | {"workers": [{"url": url} for url in urls], "tasks": [task]} | sections)
    done = run("serve", "--config", path, "--preflight", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_a_fleet_that_will_do_is_shown_and_exit_0(tmp_path: Path, engines: list[str]) -> None:
    """A line for each worker with what it is, the plan, and that nothing would fail; nothing was started."""
    code, said, errors = preflight(tmp_path, engines)
    assert (code, errors) == (0, "")
    first, second, plan, last = said.splitlines()
    assert first.startswith(f"w0 {engines[0]} dialect=sglang engine_version=")
    assert " model=tiny vocab_size=257 context=64 " in first
    assert " context=128 " in second
    assert "freeze_keep_kv" in second
    assert plan.startswith("plan: workers 2 ")
    assert last == "nothing would fail"


def test_what_would_fail_is_named_and_exit_1(tmp_path: Path, engines: list[str]) -> None:
    """An engine that is not there fails, one whose context is too short is doubted: a line each, as text and JSON."""
    nobody = f"http://127.0.0.1:{free_port()}"
    code, said, errors = preflight(tmp_path, [*engines, nobody], max_tokens=100)
    assert (code, errors) == (1, "")
    problems = [line for line in said.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1
    assert problems[0].startswith(f"problem: workers.2.url: w2 at {nobody} cannot be reached: connection: ")
    assert f"warning: tasks.0.sampling.max_tokens: w0 at {engines[0]} (sglang) has a context of 64" in said
    assert said.splitlines()[-1] == "1 would fail"
    code, said, _ = preflight(tmp_path, [*engines, nobody], "--json", max_tokens=100)
    report = json.loads(said)
    assert (code, report["ok"]) == (1, False)
    assert [f"problem: {p['path']}: {p['message']}" for p in report["problems"]] == problems
    assert [worker["failure"] is None for worker in report["workers"]] == [True, True, False]


def test_a_port_that_is_taken_fails_a_launch(tmp_path: Path, engines: list[str]) -> None:
    """P35: where an engine is to be launched at a port of somebody else, the start would be refused so."""
    port = int(engines[0].rpartition(":")[2])
    code, said, _ = preflight(tmp_path, [], workers=[{"launch": {"command": ["{python}"], "port": port}}])
    assert code == 1
    assert f"problem: workers.0.launch.port: port {port} on 127.0.0.1 is in use" in said.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--set", "workers.0.url=ftp://x"), "workers.0.url: "), (("--dry-run",), "--preflight: it reaches the engines")],
)
def test_bad_usage_and_bad_configuration_reach_nobody(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """One line, and exit 2."""
    code, shown, errors = preflight(tmp_path, ["http://127.0.0.1:9"], *arguments)
    assert (code, shown) == (2, "")
    assert errors.startswith(said)
    assert len(errors.splitlines()) == 1


def test_json_is_for_the_preflight(tmp_path: Path) -> None:
    """Asked of a service that would run, it is bad usage."""
    done = run("serve", "--config", written(tmp_path, CONFIG), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--json: is for --preflight")
