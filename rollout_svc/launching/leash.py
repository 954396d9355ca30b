"""Run a command that ends, with everything it started, when its starter does.

    python -I -S leash.py STARTER REPORT APART COMMAND ARGUMENT...

The command runs in a session of its own. Standard input is the leash: the starter holds the other end of the pipe, and
the system closes it when the starter dies, however it dies. REPORT is a descriptor for `leash N`, `pid N` and `exit N`,
or -1: the last is written when the command itself has ended, and the descriptor closed when nothing is left of it.
APART is 1 where the leash has to be the starter's grandchild.

Invariants:

- The end of standard input asks the command to stop (SIGTERM) and, after `GRACE_S`, kills all that is left of it. `t`
  read there asks, `k` kills. So does a starter that is gone although somebody else holds the pipe open.
- When the command has ended, however it did, what it left behind is ended too, whatever session it moved to: on Linux
  its orphans become children of this process, and this process ends only when it has none.
- On Linux, a leash that is killed takes the command itself with it.
- Where it is apart, whoever kills the starter and its children does not kill it: the process between the two holds
  nothing, ends as the leash does, and is gone when the starter is; its end lets go as the starter's does.
- It ends as the command did: with its exit code, or by its signal.
- It imports the standard library only, for it has to start in milliseconds and to live in little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["GRACE_S", "leashed"]

GRACE_S: Final = 5.0
"""Seconds between the request to stop and the end, where the starter cannot say so any more."""
_REST_S: Final = 3.0  # seconds that what a command left behind has to end by itself, and to unlink its shared memory
_LOOK_S: Final = 0.5  # seconds between two looks at whether the starter is still there
_POLL_S: Final = 0.01  # seconds between two looks at processes that are to end
_REAP_S: Final = 10.0  # seconds that killed processes have to go: one that is stuck in a driver may never
_NOT_FOUND: Final = 127  # what a shell answers for a command that it cannot run
_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER: Final = 36


def leashed(command: Sequence[str], report: int = -1, *, apart: bool = False) -> list[str]:
    """Return the command line that runs `command` on a leash held by this process.

    Args:
        command: the program and its arguments.
        report: a descriptor that the leash inherits, for `leash N`, `pid N` and `exit N`; -1: none.
        apart: have the leash live through a kill of this process's children.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(report), str(int(apart)), *command]


class _Leash:
    """The command's process, and how it is to end.

    Args:
        child: the command's process, which leads a session.
        starter: who has to live.
        signals: where the numbers of signals to this process can be read.
    """

    def __init__(self, child: int, starter: int, signals: int) -> None:
        self._child = child
        self._starter = starter
        self._signals = signals
        self._status: int | None = None  # of the command, once it has ended: its exit code, or minus its signal
        self._held = True
        self._kill_at = float("inf")  # monotonic seconds

    def watch(self) -> int:
        """Wait until the command has ended; returns how."""
        while self._status is None:
            self._listen(_LOOK_S)
            if time.monotonic() >= self._kill_at:
                self._kill()
            self._reap()
        return self._status

    def end_rest(self) -> None:
        """End what the command left behind: asked first, unless it is to be killed."""
        self._kill_at = min(self._kill_at, time.monotonic() + _REST_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGTERM)
            while self._reap() and time.monotonic() < self._kill_at:
                self._listen(_POLL_S)
        self._kill()
        end = time.monotonic() + _REAP_S
        while self._reap() and time.monotonic() < end:
            for pid in _children():  # ours until we reap them, so their numbers are nobody else's
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _listen(self, wait_s: float) -> None:
        """Hear what is asked for, or that a child ended, for so long at most."""
        wait_s = min(wait_s, max(_POLL_S, self._kill_at - time.monotonic()))
        ready = select.select([0, self._signals] if self._held else [self._signals], [], [], wait_s)[0]
        if self._signals in ready and signal.SIGTERM in os.read(self._signals, 64):
            self._ask()
        if 0 in ready:
            self._told(os.read(0, 64))
        if self._held and os.getppid() != self._starter:
            self._told(b"")

    def _told(self, words: bytes) -> None:
        if not words:
            self._held = False
        if not words or b"t" in words:
            self._ask()
        if b"k" in words:
            self._kill_at = time.monotonic()
        elif not words:
            self._kill_at = min(self._kill_at, time.monotonic() + GRACE_S)

    def _ask(self) -> None:
        if self._status is None:
            os.kill(self._child, signal.SIGTERM)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter where all that is left are zombies
            os.killpg(self._child, signal.SIGKILL)

    def _reap(self) -> bool:
        """Collect who has ended; returns whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == self._child:
                self._status = os.waitstatus_to_exitcode(status)
            elif pid == 0:
                return True


def _children() -> list[int]:
    """The children of this process; none where there is no /proc."""
    me, found = os.getpid(), []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs as much as all the rest to import
            if name.isdecimal():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    if int(file.read().rpartition(b")")[2].split()[1]) == me:
                        found.append(int(name))
    return found


def _prctl() -> Callable[..., Any]:
    """Linux's prctl, or something that does nothing."""
    try:
        import ctypes  # noqa: PLC0415 - not everywhere

        found: Callable[..., Any] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda *_: None
    return found


def _signals() -> int:
    """Have signals told through a pipe instead of acted upon; returns its end."""
    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return signals


def _report(descriptor: int, word: str) -> None:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, f"{word}\n".encode())


def _end_as(code: int) -> None:
    """End this process as the command ended."""
    if code < 0:
        import resource  # noqa: PLC0415 - not everywhere

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other than the default
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _step_apart(starter: int, report: int) -> int:
    """Go on in a child, and stay between it and the starter in this process; returns who has to live for the child."""
    between = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    leash = os.fork()
    if leash == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()  # nobody who ends the group in between means this
        return between
    os.close(0)
    if report >= 0:
        os.close(report)
    while True:
        pid, status = os.waitpid(leash, os.WNOHANG)
        if pid == leash:
            _end_as(os.waitstatus_to_exitcode(status))
        if os.getppid() != starter:
            os._exit(0)
        _next_child(_LOOK_S)


def _next_child(wait_s: float) -> None:
    """Wait until a child has ended, where the system can say so, and for so long at most."""
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait({signal.SIGCHLD}, wait_s)
    else:
        time.sleep(_POLL_S)


def _main(arguments: list[str]) -> None:
    starter, report, apart, command = int(arguments[0]), int(arguments[1]), arguments[2] == "1", arguments[3:]
    if report >= 0:
        os.set_inheritable(report, False)
    if apart:
        starter = _step_apart(starter, report)
    _report(report, f"leash {os.getpid()}")
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals = _signals()
    try:
        child = subprocess.Popen(  # noqa: S603 - what we are for
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - one thread
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror or error}\n")
        sys.stderr.flush()
        _report(report, f"exit {_NOT_FOUND}")
        os._exit(_NOT_FOUND)
    _report(report, f"pid {child.pid}")
    leash = _Leash(child.pid, starter, signals)
    code = leash.watch()
    _report(report, f"exit {code}")
    leash.end_rest()
    _end_as(code)


if __name__ == "__main__":
    _main(sys.argv[1:])
