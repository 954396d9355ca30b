"""Child processes: ready when they say so, named when they die, gone when we are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from rollout_svc.demo.processes import ChildFailed, Children

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SERVER = """
import signal, sys, time
print("some noise first")
print("toy.ready url=http://127.0.0.1:4711", flush=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
FAILING = """
import sys
print("cannot find the answer", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_server.py").write_text(SERVER)
    (tmp_path / "toy_failing.py").write_text(FAILING)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_child_is_ready_when_it_says_so(modules: Path) -> None:
    """Its address is read from its ready line; closing ends it, twice does no harm."""
    notes: list[str] = []
    children = Children(modules / "logs")
    with children:
        child = children.start("first", "toy", "toy_server", [])
        children.wait_ready([child], 30, notes.append)
        assert child.url == "http://127.0.0.1:4711"
        children.check()
    assert child.process.returncode == -signal.SIGTERM
    assert notes == ["first listens at http://127.0.0.1:4711"]
    children.close()


def test_a_child_that_dies_is_named_with_its_last_words(modules: Path) -> None:
    """The error has the name, the exit code and the end of the log."""
    with Children(modules / "logs") as children:
        child = children.start("second", "toy", "toy_failing", [])
        with pytest.raises(ChildFailed, match=r"second ended with exit code 3(?s:.*)cannot find the answer"):
            children.wait_ready([child], 30, lambda _: None)


def test_a_killed_child_is_found_by_check(modules: Path) -> None:
    """Whoever looks next hears of it."""
    with Children(modules / "logs") as children:
        child = children.start("third", "toy", "toy_server", [])
        children.wait_ready([child], 30, lambda _: None)
        child.process.kill()
        child.process.wait(10)
        with pytest.raises(ChildFailed, match="signal SIGKILL"):
            children.check()


def test_a_child_that_is_not_ready_in_time_is_an_error(modules: Path) -> None:
    """It says something else: that is shown, and it does not outlive the wait."""
    with Children(modules / "logs") as children:
        child = children.start("fourth", "another", "toy_server", [])
        with pytest.raises(ChildFailed, match=r"fourth is not ready after 1\.5 s(?s:.*)some noise"):
            children.wait_ready([child], 1.5, lambda _: None)
    assert child.process.poll() is not None


def test_a_deaf_child_is_killed(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not stop when asked is made to."""
    monkeypatch.setattr("rollout_svc.demo.processes.STOP_GRACE_S", 0.3)
    with Children(modules / "logs") as children:
        child = children.start("fifth", "toy", "toy_server", ["deaf"])
        children.wait_ready([child], 30, lambda _: None)
        assert until(lambda: "SigIgn" in _status(child.process.pid))
        time.sleep(0.2)  # the child ignores the signal right after its ready line
    assert child.process.returncode == -signal.SIGKILL


def _status(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return file.read()


def test_no_child_outlives_its_starter(modules: Path) -> None:
    """Also when the starter is killed and can end nothing."""
    code = f"""
import time
from pathlib import Path
from rollout_svc.demo.processes import Children
children = Children(Path({str(modules / "logs")!r}))
child = children.start("sixth", "toy", "toy_server", [])
children.wait_ready([child], 30, lambda _: None)
print(child.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert not is_gone(pid)
        starter.kill()
    assert until(lambda: is_gone(pid))
