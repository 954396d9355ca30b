"""Processes as the event loop sees them: started, logged, ended, and none forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from rollout_svc.launching import Launch, LaunchFailed, ProcessLauncher, how_it_ended, tail
from tests.support.processes import FAMILY, PYTHON, in_session, lives, parent, read_pids, until

WAIT_S = 20.0
SLEEP = "import time; time.sleep(600)"


def launch(log: Path, code: str, *arguments: str, **env: str) -> Launch:
    """A small program, and where it writes."""
    return Launch((*PYTHON, "-c", code, *arguments), env, log)


async def done(future: asyncio.Future[int | None]) -> int | None:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.shield(future)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_process_is_started_logged_and_its_end_told(tmp_path: Path, *, apart: bool) -> None:
    """Its number is known when `start` returns, its exit code when it has ended; both outputs are in the log."""
    launcher = ProcessLauncher(apart=apart)
    log = tmp_path / "deep" / "er" / "w0.log"
    code = "import os, sys; print(os.environ['WORD']); print('oh', file=sys.stderr); sys.exit(3)"
    process = await launcher.start(launch(log, code, WORD="hello"))
    assert process.pid > 0
    assert process.leash_pid not in {0, process.pid}
    assert await done(process.ended) == 3
    assert sorted(tail(log).splitlines()) == ["hello", "oh"]
    process.ask()
    process.kill()
    again = await launcher.start(launch(log, "print('second')"))
    assert await done(again.ended) == 0
    assert tail(log) == "second"
    assert "hello" in log.read_text()
    assert tail(tmp_path / "none") == ""
    await launcher.close(asyncio.get_running_loop().time() + 5)


async def test_closing_asks_first_and_then_ends_everything(tmp_path: Path) -> None:
    """Those that listen end by SIGTERM; a deaf family is killed, grandchildren too, by the deadline."""
    loop, launcher = asyncio.get_running_loop(), ProcessLauncher()
    written = tmp_path / "pids"
    polite = await launcher.start(launch(tmp_path / "a.log", SLEEP))
    deaf = await launcher.start(launch(tmp_path / "b.log", FAMILY, str(written), "deaf"))
    pids = await asyncio.to_thread(read_pids, written, 3)
    assert deaf.pid in pids
    end = loop.time() + 1.5
    await launcher.close(end)
    assert loop.time() <= end + 0.1
    assert polite.ended.result() == -signal.SIGTERM
    assert deaf.ended.result() == -signal.SIGKILL
    assert not any(map(lives, pids))
    await launcher.close(loop.time())


async def test_a_process_whose_starter_was_cancelled_is_ended_all_the_same(tmp_path: Path) -> None:
    """Nobody got it, but the launcher has it."""
    launcher, written = ProcessLauncher(), tmp_path / "pid"
    code = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    starting = asyncio.ensure_future(launcher.start(launch(tmp_path / "a.log", code, str(written))))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    [pid] = await asyncio.to_thread(read_pids, written, 1)
    await launcher.close(asyncio.get_running_loop().time() + 5)
    assert not lives(pid)


async def test_a_lost_leash_is_an_end_that_nobody_can_explain(tmp_path: Path) -> None:
    """Who kills the leash has ended the process, and what was in its group."""
    launcher, written = ProcessLauncher(), tmp_path / "pids"
    process = await launcher.start(launch(tmp_path / "a.log", FAMILY, str(written)))
    pids = await asyncio.to_thread(read_pids, written, 3)
    leash = parent(process.pid)
    os.kill(leash, signal.SIGKILL)
    assert await done(process.ended) is None
    await asyncio.to_thread(until, lambda: not in_session(process.pid), "the end of its session")
    for pid in filter(lives, pids):  # the one that left the session: only its leash could have known it
        os.kill(pid, signal.SIGKILL)


async def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    """A log that cannot be written, and a program that is not there."""
    launcher = ProcessLauncher()
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchFailed, match=r"file: (Not a directory|File exists)"):
        await launcher.start(launch(tmp_path / "file" / "a.log", SLEEP))
    process = await launcher.start(Launch(("/no/such/program",), {}, tmp_path / "a.log"))
    assert await done(process.ended) == 127
    assert tail(tmp_path / "a.log") == "/no/such/program: No such file or directory"
    await launcher.close(0.0)


def test_a_port_is_free_or_not() -> None:
    """One that somebody listens at is not; nor is one of a host that is not ours."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not ProcessLauncher.is_free("127.0.0.1", port)
    assert ProcessLauncher.is_free("127.0.0.1", port)
    assert not ProcessLauncher.is_free("192.0.2.1", port)


def test_an_end_is_told_in_words() -> None:
    """Exit codes, signals by name, and what nobody can explain."""
    assert how_it_ended(2) == "ended with exit code 2"
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(-99) == "was ended by signal 99"
    assert how_it_ended(None) == "was lost with its leash"


def test_the_end_of_a_log_is_short(tmp_path: Path) -> None:
    """Some lines of the last process, whatever bytes are in them."""
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"".join(b"line %d \xff\n" % n for n in range(50)))
    assert tail(log).splitlines()[-1] == "line 49 \N{REPLACEMENT CHARACTER}"
    assert len(tail(log).splitlines()) < 20
    log.write_text("old words\n--- started at 2026-01-01 00:00:00\n")
    assert tail(log) == ""
    assert sys.platform != "linux" or tail(Path("/proc/self/mem")) == ""
