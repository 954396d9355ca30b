"""Processes on leashes, as seen from the event loop.

Invariants:

- Every process is on a leash (`leash.py`): it and what it started end when this process does, however it does.
- A process has ended when nothing it started is left; its leash is collected in the same step.
- Nothing here blocks the loop: a process is started in a thread, and one whose starter was cancelled meanwhile is
  still this launcher's, and ended by `close`.
- A log is appended to, never cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from rollout_svc.config import LaunchConfig
from rollout_svc.launching.launch import Launch, LaunchFailed
from rollout_svc.launching.leash import leashed
from rollout_svc.launching.ports import AUTO_PORTS
from rollout_svc.tasks import wait_until

__all__ = ["LeashedProcess", "ProcessLauncher", "tail"]

_START_S: Final = 30.0  # seconds a leash has to say that the command runs: milliseconds, but for a machine that swaps
_KILL_S: Final = 1.0  # seconds of `close` that are kept for the kill
_REAP_POLL_S: Final = 0.005  # seconds between two looks at a leash that is about to end
_TAIL_LINES: Final = 15
_TAIL_BYTES: Final = 16_384  # of a log that are looked at


class LeashedProcess(asyncio.Protocol):
    """A process on a leash; reads what its leash reports.

    Attributes:
        leash_pid: number of the leash, which is there as long as anything is that the process started.
    """

    def __init__(self, leash: subprocess.Popen[bytes], log: Path) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 0
        self.leash_pid = leash.pid
        self.started: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[int | None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self._said = b""
        self._leash = leash
        self._log = log

    def __repr__(self) -> str:
        return f"<LeashedProcess {self.pid or 'starting'}{' ended' if self.ended.done() else ''}>"

    def ask(self) -> None:
        """Ask it to stop; nothing where it has ended."""
        self._tell(b"t")

    def kill(self) -> None:
        """End it and everything it started; nothing where it has ended."""
        self._tell(b"k")

    async def last_words(self) -> str:
        """The last lines of its log."""
        return await asyncio.to_thread(tail, self._log)

    def let_go(self) -> None:
        """Give the leash back: what still runs is asked, and killed by its leash soon after."""
        if self._leash.stdin is not None:
            with contextlib.suppress(OSError):
                self._leash.stdin.close()

    def _tell(self, word: bytes) -> None:
        if self._leash.stdin is not None and not self._leash.stdin.closed:
            with contextlib.suppress(OSError):
                os.write(self._leash.stdin.fileno(), word)

    def data_received(self, data: bytes) -> None:
        """Read reports, a line each."""
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"pid":
                self.pid = int(number)
                if not self.started.done():
                    self.started.set_result(None)
            elif word == b"leash":
                self.leash_pid = int(number)
            elif word == b"exit" and not self.gone.done():
                self.gone.set_result(int(number))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The leash has ended, or is about to."""
        if self.pid and not self.gone.done():
            # Somebody killed the leash: on Linux the process went with it, but what that one started did not.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._collect()

    def _collect(self) -> None:
        if self._leash.poll() is None:
            asyncio.get_running_loop().call_later(_REAP_POLL_S, self._collect)
            return
        self.let_go()
        if not self.started.done():
            self.started.set_result(None)
        if not self.gone.done():
            self.gone.set_result(None)
        if not self.ended.done():
            self.ended.set_result(self.gone.result())


class ProcessLauncher:
    """Starts processes on leashes, each with a log: the `Launcher` of this machine, which is the `Seat` of all.

    Args:
        apart: have the leashes live through a kill of this process's children.
    """

    host: Final = None
    python: Final = sys.executable
    log_folder: Final = None
    log_prefix: Final = ""
    ports: Final = AUTO_PORTS

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self._processes: set[LeashedProcess] = set()
        self._starting: set[asyncio.Future[LeashedProcess]] = set()

    def __repr__(self) -> str:
        return f"<ProcessLauncher {len(self._processes)} running, {len(self._starting)} starting>"

    @property
    def here(self) -> Self:
        """Every engine's place: this machine."""
        return self

    async def seat(self, _worker_id: str, _config: LaunchConfig, _tell: Callable[[str], object]) -> Self:
        """Give any engine the same place: this machine."""
        return self

    async def release(self) -> None:
        """Nothing was set aside."""

    @staticmethod
    def is_free(host: str, port: int) -> bool:
        """Whether a process could listen there now; a connection that just ended there is no obstacle."""
        try:
            kind, address = _looked_up(host)
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], port, *address[2:]))
        except OSError:
            return False
        return True

    async def start(self, launch: Launch) -> LeashedProcess:
        """Start a process and return when its command runs, or has ended already.

        Raises:
            LaunchFailed: its log cannot be written, or the system has no room for another process.
        """
        name = f"start:{launch.log.name}"
        starting = asyncio.get_running_loop().create_task(self._start(launch), name=name)
        self._starting.add(starting)
        starting.add_done_callback(self._started)
        return await asyncio.shield(starting)

    def _started(self, starting: asyncio.Future[LeashedProcess]) -> None:
        self._starting.discard(starting)
        if not starting.cancelled():
            starting.exception()  # seen, also where whoever asked was cancelled

    async def _start(self, launch: Launch) -> LeashedProcess:
        loop = asyncio.get_running_loop()
        try:
            leash, reports = await asyncio.to_thread(_spawn, launch, apart=self._apart)
        except OSError as error:
            raise LaunchFailed(f"{error.filename or launch.command[0]}: {error.strerror or error}") from error
        pipe = os.fdopen(reports, "rb", buffering=0)
        _, process = await loop.connect_read_pipe(lambda: LeashedProcess(leash, launch.log), pipe)
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._processes.discard(process))
        await asyncio.wait({process.started}, timeout=_START_S)
        if not process.started.done():
            process.kill()
            raise LaunchFailed(f"{launch.command[0]}: it was not started in {_START_S:g} s")
        return process

    async def close(self, deadline: float) -> None:
        """Ask all to stop, then make them; what has not gone by `deadline` (loop time) is left to its leash."""
        await wait_until(self._starting, deadline - _KILL_S)
        for process in self._processes:
            process.ask()
        await wait_until([process.ended for process in self._processes], deadline - _KILL_S)
        for process in self._processes:
            process.kill()
        await wait_until([process.ended for process in self._processes], deadline)
        for process in self._processes:
            process.let_go()


@lru_cache(maxsize=64)
def _looked_up(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Where a host is, asked once: a name server may be slow, and ports are tried in the loop. Raises OSError.

    The first to ask is the check of the settings, in a thread.
    """
    kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return kind, address


def _spawn(launch: Launch, *, apart: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start the leash, in a thread; returns it and the end of the pipe that its reports come from."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    reports, written = os.pipe()
    try:
        with launch.log.open("ab") as log:
            log.write(f"--- started at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            leash = subprocess.Popen(  # noqa: S603 - the operator's own command
                leashed(launch.command, written, apart=apart),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.env},
                pass_fds=(written,),
                start_new_session=True,
                bufsize=0,
            )
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(written)
    return leash, reports


def tail(log: Path) -> str:
    """Return the last lines of a file, of what the last process said there; empty where it said nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said: list[str] = []
    for line in reversed(lines):
        if line.startswith("--- started at ") or len(said) == _TAIL_LINES:
            break
        said.append(line)
    return "\n".join(reversed(said))
