"""The process that makes judge processes by forking, and buries them with all that they started.

    python -c "…" DESCRIPTOR      started by `pool.py`, which holds the other end

Messages to it: `F`, with two descriptors, makes a judge process that serves the first and writes where it is when it
breaks into the second; `K pid` ends one. From it: `P pid` for each `F`, in order, and `G pid code` when one is gone.

Invariants:

- It runs nobody's code: judgers are imported in its children only, so that each starts as clean as the first.
- On Linux orphans of a judge process are adopted by it while it lives, and by this process afterwards: a child here
  that is no judge process is left over, whatever session it moved to, and is ended.
- `G` is said when nothing is left of a judge process, or `BURIAL_S` have passed.
- The end of the service, however it ends, is the end of this process, and that of all its children.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from rollout_svc.judging.processes.work import work

__all__ = ["COMMAND", "main"]

COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rollout_svc.judging.processes.warden import main; main(int(sys.argv[1]))"
)
"""What starts it: with a descriptor, and with the starter's `sys.path`."""

BURIAL_S: Final = 5.0
"""Seconds for ending what one judge process left behind: one that forks faster than it is killed may win."""
_TRACE_S: Final = 0.2  # seconds that a process has to write where it is
_POLL_S: Final = 0.002  # seconds between two looks at processes that are to end
_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER: Final = 36


class _Warden:
    """The judge processes there are.

    Args:
        control: the other end is the service's.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._judges: set[int] = set()
        self._prctl = _prctl()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._signals, written = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def watch(self) -> None:
        """Do as the service says until it is gone."""
        while True:
            ready = select.select([self._control.fileno(), self._signals], [], [])[0]
            if self._signals in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._signals, 4096)
                self._bury()
            if self._control.fileno() in ready and not self._obey():
                return

    def end(self) -> None:
        """Kill everything."""
        for pid in self._judges:
            _kill(pid, signal.SIGKILL)
        self._judges.clear()
        self._sweep()

    def _obey(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 2)
        except ConnectionResetError:  # it was killed with words of ours unread
            return False
        if message[:1] == b"F":
            pid = self._fork(*descriptors)
            self._judges.add(pid)
            self._say(f"P {pid}")
        elif message[:1] == b"K":
            self._end_one(int(message[1:]))
        return bool(message)

    def _fork(self, channel: int, trace: int) -> int:
        if pid := os.fork():
            os.close(channel)
            os.close(trace)
            return pid
        code = 1
        try:
            self._become_judge(trace)
            with socket.socket(fileno=channel) as served:
                work(served)
            code = 0
        finally:
            os._exit(code)

    def _become_judge(self, trace: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._signals)
        self._control.close()
        os.setsid()
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(trace, all_threads=False)

    def _end_one(self, pid: int) -> None:
        if pid not in self._judges:
            return  # it ended by itself meanwhile, and that was said
        _kill(pid, signal.SIGABRT)  # it writes where it is
        end = time.monotonic() + _TRACE_S
        while pid in self._judges and time.monotonic() < end:
            self._bury()
            time.sleep(_POLL_S)
        if pid in self._judges:
            _kill(pid, signal.SIGKILL)
            end = time.monotonic() + BURIAL_S
            while pid in self._judges and time.monotonic() < end:
                self._bury()
                time.sleep(_POLL_S)

    def _bury(self) -> None:
        """Collect who has ended; say so when nothing is left of them."""
        gone = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in self._judges:
                self._judges.discard(pid)
                gone.append((pid, os.waitstatus_to_exitcode(status)))
        if gone:
            self._sweep()
        for pid, code in gone:
            self._say(f"G {pid} {code}")

    def _sweep(self) -> None:
        """End every child that is no judge process, and what they started."""
        end = time.monotonic() + BURIAL_S
        while (left := _descendants(self._judges)) and time.monotonic() < end:
            for pid in left:
                _kill(pid, signal.SIGKILL)
            self._collect(left)

    def _collect(self, left: list[int]) -> None:
        """Wait for those of them that are ours."""
        for pid in left:
            for _ in range(50):
                try:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        break
                except ChildProcessError:  # somebody else's child: ours in the next round
                    break
                time.sleep(_POLL_S)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the service is gone: the next look at it says so
            self._control.send(text.encode())


def _descendants(but: set[int]) -> list[int]:
    """Everybody below this process except these and those below them; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - it is looked at often
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    below = [pid for pid in children.get(os.getpid(), ()) if pid not in but]
    while below:
        found += below
        below = [pid for parent in below for pid in children.get(parent, ())]
    return found


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl() -> Callable[..., Any]:
    """Linux's prctl, or something that does nothing."""
    try:
        import ctypes  # noqa: PLC0415 - not everywhere

        found: Callable[..., Any] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda *_: None
    return found


def main(descriptor: int) -> None:
    """Be the warden."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the service's to hear
    sys.argv[1:] = []
    os.dup2(2, 1)  # what judgers print is no answer of the service's
    gc.freeze()
    warden = _Warden(socket.socket(fileno=descriptor))
    try:
        warden.watch()
    finally:
        warden.end()
