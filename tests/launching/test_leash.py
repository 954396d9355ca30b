"""The leash: nothing a command started outlives its starter, nor the command itself.

Where the leash's own grace is waited for, a copy of it is run whose times are a tenth: every rule holds at any scale.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_svc.launching import leash
from rollout_svc.launching.leash import leashed
from tests.support.processes import FAMILY, PYTHON, in_session, lives, parent, read_pids, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

QUICK = {name: f"{name}: Final = {getattr(leash, name)}" for name in ("GRACE_S", "_REST_S", "_LOOK_S")}
"""What is waited for, as the leash's source has it."""

STARTER = """
import subprocess, sys, time
from leash import leashed
held = subprocess.Popen(leashed(sys.argv[1:]), stdin=subprocess.PIPE)
time.sleep(600)
"""


def held(command: list[str], source: str = leash.__file__, **options: object) -> subprocess.Popen[bytes]:
    """Run a command on a leash that this test holds."""
    words = [source if word == leash.__file__ else word for word in leashed(command)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def ended(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> int:
    """Wait for its end, and let the leash go."""
    code = process.wait(timeout_s)
    if process.stdin is not None:
        process.stdin.close()
    return code


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have processes that are started find `leash`, a copy that waits for a tenth of the time; gives its path."""
    source = Path(leash.__file__).read_text()
    for name, line in QUICK.items():
        assert source.count(line) == 1
        source = source.replace(line, f"{name}: Final = {getattr(leash, name) / 10}")
    (tmp_path / "leash.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(tmp_path / "leash.py")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("deaf", [[], ["deaf"]])
def test_nothing_is_left_when_the_starter_is_killed(tmp_path: Path, deaf: list[str]) -> None:
    """Kill -9 of the starter: the command, its child and its grandchild are gone, though they ignore SIGTERM."""
    written = tmp_path / "pids"
    command = [*PYTHON, "-c", FAMILY, str(written), *deaf]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *command])
    pids = read_pids(written, 3)
    starter.kill()
    starter.wait()
    until(lambda: not any(map(lives, pids)), f"the end of {pids}")
    assert in_session(pids[-1]) == []


APART = """
import os, subprocess, sys, time
from leash import leashed
held = subprocess.Popen(leashed(sys.argv[1:], apart=True), stdin=subprocess.PIPE, start_new_session=True)
print(held.pid, flush=True)
if sys.stdin.readline() == "children\\n":
    os.kill(held.pid, 9)    # as Ray ends a worker's process: its children first, then itself
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["children", "alone", "between"])
def test_a_leash_apart_lives_through_the_kill_of_the_children(tmp_path: Path, how: str) -> None:
    """Whoever ends the starter with its children, or either alone, leaves nothing, in whatever session it is."""
    written = tmp_path / "pids"
    command = [sys.executable, "-c", APART, *PYTHON, "-c", FAMILY, str(written), "deaf"]
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdin is not None
    assert starter.stdout is not None
    with starter.stdin as told, starter.stdout as said:
        between = int(said.readline())
        pids = read_pids(written, 3)
        [held_by] = {parent(pid) for pid in pids} - set(pids)
        assert (parent(held_by), parent(between)) == (between, starter.pid)
        if how == "children":
            told.write("children\n")
            told.flush()
        else:
            os.kill(between if how == "between" else starter.pid, signal.SIGKILL)
        until(lambda: not any(map(lives, (*pids, held_by, between))), f"the end of {pids}")
    starter.kill()
    starter.wait()


def test_a_leash_apart_ends_as_the_command_did() -> None:
    """What stands between has the exit code, and the starter's words reach the command."""
    for words, code in (("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)):
        process = subprocess.Popen(leashed([*PYTHON, "-c", words], apart=True), stdin=subprocess.PIPE)
        assert ended(process) == code
    process = subprocess.Popen(leashed(["sleep", "600"], apart=True), stdin=subprocess.PIPE)
    assert process.stdin is not None
    os.write(process.stdin.fileno(), b"k")
    assert ended(process) == -signal.SIGKILL


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path, quick: str) -> None:
    """A front end that dies alone takes its workers along, also those that left its session."""
    written = tmp_path / "pids"
    process = held([*PYTHON, "-c", FAMILY, str(written)], quick)
    pids = read_pids(written, 3)
    leader = next(pid for pid in pids if parent(pid) == process.pid and os.getpgid(pid) == pid)
    os.kill(leader, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    assert not any(map(lives, pids))


@pytest.mark.parametrize(
    ("words", "code"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)]
)
def test_it_ends_as_the_command_did(words: str, code: int) -> None:
    """Its own end has the command's exit code, or its signal."""
    assert ended(held([*PYTHON, "-c", words])) == code


def test_a_command_that_cannot_be_run_says_so() -> None:
    """Exit code 127, and the system's words."""
    process = held(["/no/such/program"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr as said:
        assert said.read() == b"/no/such/program: No such file or directory\n"
    assert ended(process) == 127


def test_asked_it_stops_and_deaf_it_is_killed(tmp_path: Path) -> None:
    """`t` and SIGTERM ask the command alone; `k` ends everything at once."""
    for ask in ("t", "signal"):
        process = held([*PYTHON, "-c", "print('up', flush=True); import time; time.sleep(600)"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout as said:
            assert said.readline() == b"up\n"
            if ask == "t":
                os.write(process.stdin.fileno(), b"t")
            else:
                process.terminate()
            assert ended(process) == -signal.SIGTERM
    written = tmp_path / "pids"
    process = held([*PYTHON, "-c", FAMILY, str(written), "deaf"])
    pids = read_pids(written, 3)
    assert process.stdin is not None
    os.write(process.stdin.fileno(), b"t")
    os.write(process.stdin.fileno(), b"k")
    assert ended(process, leash.GRACE_S / 2) == -signal.SIGKILL
    assert not any(map(lives, pids))


def test_a_leash_that_is_killed_takes_the_command_with_it(tmp_path: Path) -> None:
    """Even where somebody ends the leash for good, the command does not go on alone."""
    written = tmp_path / "pid"
    process = held(
        [
            *PYTHON,
            "-c",
            "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)",
            str(written),
        ]
    )
    [pid] = read_pids(written, 1)
    process.kill()
    assert ended(process) == -signal.SIGKILL
    until(lambda: not lives(pid), "the end of the command")
