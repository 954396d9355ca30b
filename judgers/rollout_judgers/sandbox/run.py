"""One run of a program in the sandbox: fed, read, timed, killed, and nothing left.

Invariants:

- It returns by its wall clock and `GONE_S`, whatever the program does with its output, its signals or its children.
- When it returns, every process of the run is dead.
- A sandbox that could not be built is an error, never a program that failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rollout_judgers.sandbox.limits import Limits
from rollout_judgers.sandbox.walls import ENVIRONMENT, READY, Walls

__all__ = ["GONE_S", "Ran", "Sandbox", "SandboxError"]

GONE_S: Final = 5.0
"""Seconds for killed processes to be gone; they need milliseconds."""
_FIRST: Final = re.compile(r'"child-pid": (\d+)')  # of bubblewrap, which does not wait for it
_MOUNT_POINT: Final = "/dev/shm"  # noqa: S108 - covered in the sandbox's own namespace, and there everywhere
_CHUNK: Final = 1 << 16  # bytes read at once
_POLL_S: Final = 0.002  # seconds between two looks at processes that are to end
_LAST_WORDS_S: Final = 0.5  # seconds for the output of a program that has ended
_OUTSIDE: Final = {**ENVIRONMENT, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


class SandboxError(Exception):
    """Raised when a program could not be run at all."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program.

    Attributes:
        exit_code: its own; above 128, or negative: the signal that ended it; None where it was killed by us.
        stdout: what it wrote, up to the limit.
        stderr: likewise.
        killed: why we killed it: `timeout` or `output`; None where we did not.
        wall_s: seconds it took, walls included.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    killed: str | None
    wall_s: float


class Sandbox:
    """Runs programs within walls."""

    def __init__(self, walls: Walls) -> None:
        self._walls = walls

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        """Run a program; blocks until it has ended.

        Args:
            command: the program and its arguments.
            stdin: what it reads.
            files: what it finds in its home, which is its working directory.
            limits: what it may use.

        Raises:
            SandboxError: the sandbox could not be built.
        """
        bounds = limits or Limits()
        with contextlib.ExitStack() as held:
            workplace = _MOUNT_POINT  # nothing to clean up after one whose judge process is killed
            if self._walls.kind == "none" or not Path(workplace).is_dir():
                workplace = held.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            status, written = os.pipe()
            info = os.dup(written)
            held.callback(os.close, status)
            given = {_content(held, content): name for name, content in (files or {}).items()}
            if self._walls.kind == "none":
                _write(workplace, files or {})
            line = self._walls.command(command, bounds, given, status=written, info=info, workplace=workplace)
            try:
                process = _start(line, [written, info, *given], workplace if self._walls.kind == "none" else "/")
            except OSError as error:
                raise SandboxError(f"{line[0]}: {error.strerror or error}") from error
            finally:
                os.close(written)
                os.close(info)
            os.set_blocking(status, False)
            run = _Run(process, stdin, bounds, status)
            ran = run.finish()
            if READY in run.status():
                return ran
            raise SandboxError(
                f"the sandbox could not be built: {ran.stderr.strip()[-500:] or ran.killed or 'it ended'}"
            )


class _Run:
    """A program under way."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, limits: Limits, status: int) -> None:
        self._process = process
        self._status = status
        self._told = ""
        self._limits = limits
        self._unfed = memoryview(stdin)
        self._begun = time.monotonic()
        self._written: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._killed: str | None = None

    def finish(self) -> Ran:
        """Feed and read it until it has ended, by itself or not; nothing of it is left."""
        try:
            with selectors.DefaultSelector() as selector, self._pipes(selector):
                self._attend(selector)
                self._kill()
                self._read_rest(selector)
        finally:
            first = _FIRST.search(self.status().partition(READY)[0])  # after that the program may write there too
            with _watched(int(first[1]) if first else None) as gone:
                self._kill()
                _bury(self._process)
                gone()
        code = None if self._killed else self._process.returncode
        text = {name: bytes(written).decode(errors="replace") for name, written in self._written.items()}
        return Ran(code, text["stdout"], text["stderr"], self._killed, time.monotonic() - self._begun)

    def status(self) -> str:
        """What was said by whoever built the walls."""
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._status, _CHUNK).decode(errors="replace")
        return self._told

    @contextlib.contextmanager
    def _pipes(self, selector: selectors.BaseSelector) -> Iterator[None]:
        process = self._process
        assert process.stdin is not None  # noqa: S101 - asked for
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr), ("stdin", process.stdin)):
            assert pipe is not None  # noqa: S101 - asked for
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ, name)
        ended = os.pidfd_open(process.pid)
        selector.register(ended, selectors.EVENT_READ, "ended")
        try:
            yield
        finally:
            os.close(ended)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _attend(self, selector: selectors.BaseSelector) -> None:
        end = self._begun + self._limits.wall_s
        while self._killed is None:
            left = end - time.monotonic()
            if left <= 0:
                self._killed = "timeout"
                return
            for key, _ in selector.select(left):
                if key.data == "ended":
                    return
                self._serve(selector, key)

    def _read_rest(self, selector: selectors.BaseSelector) -> None:
        end = time.monotonic() + _LAST_WORDS_S
        while any(key.data in self._written for key in selector.get_map().values()) and time.monotonic() < end:
            for key, _ in selector.select(_POLL_S):
                if key.data in self._written:
                    self._serve(selector, key)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
        if key.data == "stdin":
            with contextlib.suppress(BlockingIOError):
                try:
                    self._unfed = self._unfed[os.write(pipe.fileno(), self._unfed[:_CHUNK]) if self._unfed else 0 :]
                except BrokenPipeError:  # it does not read: its own affair
                    self._unfed = memoryview(b"")
            if not self._unfed:
                selector.unregister(pipe)
                with contextlib.suppress(OSError):
                    pipe.close()
            return
        chunk = os.read(pipe.fileno(), _CHUNK)
        if not chunk:
            selector.unregister(pipe)
        room = self._limits.output_bytes - len(self._written[key.data])
        self._written[key.data] += chunk[:room]
        if len(chunk) > room and self._killed is None:
            self._killed = "output"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _watched(pid: int | None) -> Iterator[Callable[[], None]]:
    """Watch a process that is not our child; gives what waits for its end."""
    try:
        descriptor = -1 if pid is None else os.pidfd_open(pid)
    except ProcessLookupError:
        descriptor = -1
    if pid is None or descriptor < 0:
        yield lambda: None
        return

    def wait() -> None:
        select.select([descriptor], [], [], GONE_S)
        with contextlib.suppress(ChildProcessError):  # it became our child where orphans do
            os.waitpid(pid, os.WNOHANG)

    try:
        yield wait
    finally:
        os.close(descriptor)


def _bury(process: subprocess.Popen[bytes]) -> None:
    """Wait until it is gone, and so is the first process inside, where that became our child."""
    end = time.monotonic() + GONE_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-process.pid, os.WNOHANG)[0] == 0:
                time.sleep(_POLL_S)


def _start(line: Sequence[str], descriptors: Sequence[int], directory: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - that is what it is for
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        env=_OUTSIDE,
        cwd=directory,
        start_new_session=True,
    )


def _content(held: contextlib.ExitStack, content: bytes) -> int:
    """A descriptor that the content can be read from."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
    held.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _write(directory: str, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        with open(os.path.join(directory, name), "wb") as file:  # noqa: PTH118, PTH123 - plain names
            file.write(content)
