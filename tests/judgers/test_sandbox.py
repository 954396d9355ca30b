"""The sandbox, attacked: nothing gets out, nothing is left, and it always comes back in time."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from rollout_judgers.sandbox import Limits, Ran, Sandbox, SandboxError, Walls, choose
from rollout_judgers.sandbox.limits import MIB
from rollout_judgers.sandbox.run import GONE_S
from tests.support.processes import lives

PYTHON: Final = [str(Path(sys.base_prefix) / "bin" / "python3"), "-I", "-S"]
SHORT_S: Final = 0.4
MARK: Final = f"marked-{os.getpid()}"
"""In the command line of every process of these tests."""


def walls() -> list[Walls]:
    """Those that stand here; one that says why where none does."""
    found = [choose("unshare"), choose("bubblewrap")]
    return [walls for walls in found if isinstance(walls, Walls)]


@pytest.fixture(params=["unshare", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox of each kind that works here."""
    found = choose(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return Sandbox(found)


def run(sandbox: Sandbox, code: str, limits: Limits | None = None) -> Ran:
    """Run a program, and check that nothing of it is left when it has been."""
    ran = sandbox.run([*PYTHON, "-c", code, MARK], limits=limits or Limits(wall_s=10.0))
    left = [path for path in Path("/proc").glob("[0-9]*") if _marked(path) and lives(int(path.name))]
    assert not left
    return ran


def _marked(path: Path) -> bool:
    try:
        return MARK.encode() in (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def test_a_program_is_fed_and_read(sandbox: Sandbox) -> None:
    """It reads what it was given, finds its files, writes to both outputs, and says how it ended."""
    code = "import sys; print(input()[::-1], open('f').read()); print('e', file=sys.stderr); sys.exit(3)"
    ran = sandbox.run([*PYTHON, "-c", code], stdin=b"abc\n", files={"f": b"content"})
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.killed) == (3, "cba content\n", "e\n", None)


def test_a_program_cannot_make_us_wait_for_another_process(sandbox: Sandbox) -> None:
    """What it writes where the builders of its walls tell who is inside is not believed."""  # P21
    code = f"""
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b'{{"child-pid": {os.getpid()}}}')
    except OSError:
        pass
"""
    begun = time.monotonic()
    assert run(sandbox, code).exit_code == 0
    assert time.monotonic() - begun < GONE_S


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "from signal import *\nimport time\nfor s in {*range(1, 32)} - {9, 19}: signal(s, SIG_IGN)\ntime.sleep(600)",
        "import os, time\nos.close(0), os.close(1), os.close(2)\ntime.sleep(600)",
        "import os\nwhile True: os.fork()",
    ],
    ids=["loop", "deaf", "closed outputs", "fork bomb"],
)
def test_what_does_not_end_is_ended(sandbox: Sandbox, code: str) -> None:
    """At its time it is killed, with all it made, and the machine still works."""  # P21
    begun = time.monotonic()
    # Few processes: those of a bomb would take the processors from all that is tested beside it.
    ran = run(sandbox, code, Limits(wall_s=SHORT_S, processes=8))
    assert ran.killed == "timeout" or "BlockingIOError" in ran.stderr
    assert time.monotonic() - begun < SHORT_S + 5.0


def test_processes_are_counted(sandbox: Sandbox) -> None:
    """The one too many is refused."""
    code = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(600)\nexcept OSError: print(n)"
    ran = run(sandbox, code, Limits(processes=10))
    assert 5 <= int(ran.stdout) <= 10


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    """A program that takes more is told so, and the machine is not asked for it."""
    ran = run(sandbox, "x = bytearray(1 << 30)", Limits(memory_bytes=256 * MIB))
    assert "MemoryError" in ran.stderr


def test_a_flood_of_output_ends_it(sandbox: Sandbox) -> None:
    """What it wrote up to the bound is kept, the rest is not, and it does not go on."""
    ran = run(sandbox, "while True: print('x' * 1000)", Limits(output_bytes=10_000))
    assert ran.killed == "output"
    assert len(ran.stdout) == 10_000
    assert ran.exit_code is None


def test_files_are_bounded(sandbox: Sandbox) -> None:
    """Neither one large file nor many small ones fill the machine."""
    code = """
for number in range(1000):
    try:
        open(f"f{number}", "wb").write(b"x" * (1 << 20))
    except OSError as error:
        print(number, error.errno)
        break
"""
    ran = run(sandbox, code, Limits(file_bytes=4 * MIB))
    number, _ = ran.stdout.split()
    assert int(number) <= 4


@pytest.mark.parametrize("path", ["/usr/x", "/x", "/etc/x", "/dev/x", f"{sys.base_prefix}/x"])
def test_the_system_is_read_only(sandbox: Sandbox, path: str) -> None:
    """Nothing is made outside its home."""
    ran = run(sandbox, f"open({path!r}, 'w')")
    assert ran.exit_code == 1
    assert not Path(path).exists()


def test_files_outside_are_neither_seen_nor_deleted(sandbox: Sandbox, tmp_path: Path) -> None:
    """A file of ours is not there; deleting all it can reach deletes nothing of ours."""
    ours = tmp_path / "ours"
    ours.write_text("ours", encoding="ascii")
    assert "FileNotFoundError" in run(sandbox, f"open({str(ours)!r})").stderr
    code = "import shutil, os\nfor d in {*os.listdir('/')} - {'usr', 'proc'}: shutil.rmtree('/' + d, True)"
    run(sandbox, code)
    assert ours.read_text(encoding="ascii") == "ours"
    assert Path(PYTHON[0]).exists()


def test_there_is_no_network(sandbox: Sandbox) -> None:
    """A server of this machine cannot be reached, nor any other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert ran.exit_code == 1
    assert "OSError" in ran.stderr or "ConnectionRefused" in ran.stderr
    assert (
        "Network is unreachable" in run(sandbox, "import socket; socket.create_connection(('1.1.1.1', 53), 2)").stderr
    )


def test_the_environment_outside_is_not_seen(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the service is in its environment, nor in that of any process it can look at."""
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")
    code = """
import glob
for path in ["/proc/self/environ", *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline")]:
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    ran = run(sandbox, code)
    assert ran.exit_code == 0
    assert "do-not-tell" not in ran.stdout


def test_nobody_outside_can_be_killed(sandbox: Sandbox) -> None:
    """Our number means nobody in there, and killing everybody kills nobody of ours, nor the walls' keeper."""
    code = f"""
import os
for target in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(target, 9)
        print("killed")
    except OSError as error:
        pass
try:
    os.kill(1, 9)  # may be allowed, and does nothing
except OSError as error:
    pass
print("here")
"""
    assert run(sandbox, code).stdout == "here\n"
    run(sandbox, "import os; os.kill(-1, 9)")


def test_a_daemon_does_not_outlive_its_program(sandbox: Sandbox) -> None:
    """One that forked twice, in a session of its own, deaf to signals, is gone when the program is."""
    code = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("done", flush=True)
"""
    begun = time.monotonic()
    ran = run(sandbox, code)
    assert (ran.exit_code, ran.stdout) == (0, "done\n")
    assert time.monotonic() - begun < 5.0


def test_it_has_no_rights_and_gets_none(sandbox: Sandbox) -> None:
    """No capability is left, and no program gives one."""
    ran = run(sandbox, "print(open('/proc/self/status').read())")
    assert "CapEff:\t0000000000000000" in ran.stdout
    assert "CapBnd:\t0000000000000000" in ran.stdout
    assert "NoNewPrivs:\t1" in ran.stdout


@pytest.mark.parametrize("sandbox", ["unshare"], indirect=True)
def test_a_sandbox_that_cannot_be_built_is_no_verdict(sandbox: Sandbox) -> None:
    """It is an error of its own; the program is not said to have failed."""
    with pytest.raises(SandboxError, match=r"could not be built|[nN]o such"):
        Sandbox(Walls(sandbox._walls.kind)).run([*PYTHON, "-c", ""], files={"no/such/folder": b""})
