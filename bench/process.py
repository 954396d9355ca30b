"""Child processes of a bench: started, waited for, read, measured, ended.

- A child that is not ready in time, or ends before it is, is an error with the last lines it wrote.
- A child never outlives its context; its output is drained always, so that it never blocks on a full pipe.
"""

from __future__ import annotations

import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any, Self, cast

import orjson

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["PARENT_POLL_S", "Child", "ChildFailedError", "cpu_time_s", "raise_open_files"]

READY_TIMEOUT_S = 60.0
"""Default patience, in seconds, for a child's ready line: an import of everything on a busy machine, and much more."""
GRACE_S = 10.0
"""Time from the polite end of a child to the forced one, in seconds."""
PARENT_POLL_S = 0.5
"""How often a child looks for its parent, whose death sends no event, in seconds."""
TAIL_LINES = 30
"""Lines of a failed child's output that the error quotes."""
CPUCLOCK_SCHED = 2
"""Which of a process's clocks: time scheduled on a CPU, in ns (Linux's encoding of a process in a clock id)."""


class ChildFailedError(RuntimeError):
    """Raised when a child process ended, or kept silent, before it did what was waited for."""


def cpu_time_s(pid: int) -> float:
    """CPU time of a process so far, all its threads, user and system, in seconds.

    Read from the process's CPU clock (ns); where that is refused, from `/proc/PID/stat` (10 ms).
    """
    try:
        return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    except OSError:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - one read of a kernel file
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Child:
    """`python -m MODULE ARGS` as a child, for the length of a `with`.

    Args:
        module: what to run.
        args: its command line.
        ready: first word of the line that says it is ready; None: do not wait.
        timeout_s: how long that line may take.
        env: variables added to this process's own.

    Attributes:
        ready_line: the words after the first of the ready line (`ready 4711` gives `["4711"]`).
    """

    def __init__(
        self,
        module: str,
        *args: object,
        ready: str | None = "ready",
        timeout_s: float = READY_TIMEOUT_S,
        env: dict[str, str] | None = None,
    ) -> None:
        self.module = module
        self.command = [sys.executable, "-m", module, *map(str, args)]
        self.ready_line: list[str] = []
        self._ready = ready
        self._timeout_s = timeout_s
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid={self._process.pid} rc={self._process.poll()}"
        return f"<Child {self.module} {state}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._started.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self!r}: use it in a with statement")
        return self._process

    @property
    def cpu_s(self) -> float:
        """Its CPU time so far, in seconds."""
        return cpu_time_s(self.pid)

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def __enter__(self) -> Self:
        process = self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._env
        )
        pipes = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
        for pipe, target in zip(pipes, (self._lines, None), strict=True):
            thread = threading.Thread(target=self._drain, args=(pipe, target), daemon=True)
            thread.start()
            self._threads.append(thread)
        if self._ready is not None:
            try:
                self.ready_line = self.wait_line(self._ready, self._timeout_s).split()[1:]
            except BaseException:
                self.terminate(0.0)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()

    def _drain(self, pipe: IO[bytes], lines: queue.Queue[str | None] | None) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                self._tail.append(line)
                if lines is not None:
                    lines.put(line)
        if lines is not None:
            lines.put(None)

    def read_line(self, timeout_s: float) -> str:
        """Read the next line of its standard output.

        Raises:
            ChildFailedError: when there is none within `timeout_s`, or it has ended.
        """
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise self._failed(f"silent for {timeout_s:.1f} s") from None
        if line is None:
            self._lines.put(None)
            code = self._started.wait(GRACE_S)
            for thread in self._threads:
                thread.join(GRACE_S)
            raise self._failed(f"ended with status {code}")
        return line

    def wait_line(self, first_word: str, timeout_s: float) -> str:
        """Read lines until one begins with that word, under one deadline; return it. Errors as `read_line`."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.read_line(deadline - time.monotonic())
            if line.split(maxsplit=1)[:1] == [first_word]:
                return line

    def read_json(self, timeout_s: float) -> dict[str, Any]:
        """Read lines until one is a JSON object, under one deadline; return it. Errors as `read_line`."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.read_line(deadline - time.monotonic())
            if line.startswith("{"):
                value: dict[str, Any] = orjson.loads(line)
                return value

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return its exit status.

        Raises:
            ChildFailedError: when it still runs after `timeout_s`.
        """
        try:
            return self._started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failed(f"still running after {timeout_s:.1f} s") from None

    def kill(self) -> None:
        """End it as a crash does: it gets to do nothing more."""
        self._started.kill()
        self.terminate()

    def terminate(self, grace_s: float = GRACE_S) -> int | None:
        """End it, politely for `grace_s`, then by force; return its exit status. Idempotent, safe before start."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join(GRACE_S)
        return process.returncode

    def _failed(self, what: str) -> ChildFailedError:
        tail = "".join(f"\n  | {line}" for line in self._tail)
        return ChildFailedError(f"{' '.join(self.command[1:])}: {what}{tail}")
