"""One judge process as the service holds it, and the warden that forks them.

Invariants:

- What is held of a process, its channel and its trace, is given up once, in `forget`.
- What a process that is gone took with it is told with the file and line where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final, Self

from rollout_svc import blame
from rollout_svc.exits import how_it_ended
from rollout_svc.judging.processes import frames
from rollout_svc.judging.processes.lines import Job, Seat
from rollout_svc.judging.processes.warden import COMMAND
from rollout_svc.judging.values import JudgerError

__all__ = ["JudgeProcess", "make_warden", "wait_for"]

_CLOSE_S: Final = 10.0  # seconds for the warden to end everything: it needs milliseconds


@dataclass(eq=False, slots=True)
class JudgeProcess:
    """A judge process, as the service sees it."""

    channel: socket.socket
    trace: int
    seat: Seat
    read: bytearray
    unsent: bytearray
    pid: int = 0
    ready: bool = False
    answered: bool = False
    """Whether it ever answered a call."""
    lost: Job | None = None
    """What it ran when it was ended."""
    why: Exception | None = None
    """Why it was ended; None where it ended by itself."""
    timer: asyncio.TimerHandle | None = None
    ending: bool = False

    @classmethod
    def unborn(cls) -> tuple[Self, socket.socket]:
        """Make one that is to be forked, and the end of its channel that is its own."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        return cls(ours, os.memfd_create("trace", os.MFD_CLOEXEC), Seat(), bytearray(), bytearray()), theirs

    def loss(self, code: int | None) -> Exception:
        """The failure of the call it ran when it was ended; `code`: how it ended, None: nobody knows yet."""
        place = blame.last_place(os.pread(self.trace, frames.ANSWER_BYTES, 0).decode(errors="replace"))
        error = self.why
        if error is None:
            how = "closed its channel" if code is None or code == -signal.SIGABRT else how_it_ended(code)
            error = JudgerError(f"its process {how}")
        return type(error)(f"{error} ({place})".lstrip()) if place else error

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up what is held of it; idempotent."""
        self.ending = True
        if self.timer is not None:
            self.timer.cancel()
        if self.channel.fileno() >= 0:
            loop.remove_reader(self.channel)
            loop.remove_writer(self.channel)
            self.channel.close()
            os.close(self.trace)


def make_warden() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the warden; returns it, and where it hears and speaks. Blocks; raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", COMMAND, str(theirs.fileno()), json.dumps(sys.path)]
        warden = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    ours.setblocking(False)
    return warden, ours


def wait_for(warden: subprocess.Popen[bytes]) -> None:
    """Wait until a warden whose channel was closed has ended, and end it where it takes too long. Blocks."""
    try:
        warden.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        warden.kill()
        warden.wait()
