"""Synchronous judgers that treat their process badly, one way each."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollout_svc.judging import JudgedSample
from rollout_svc.judging.processes import frames

__all__ = ["Hostile"]

LONG_S = 600


class Hostile:
    """Do as `how` says; write the numbers of the processes it makes to `pids`.

    The methods that return do so with 1.0, as if nothing had been.
    """

    def __init__(self, *, how: str, pids: str = "") -> None:
        self.how = how
        self.pids = pids

    def judge(self, sample: JudgedSample) -> Any:
        result = getattr(self, self.how)()
        return 1.0 if result is None else result

    def prints(self) -> None:
        print("loud " * 20_000, flush=True)  # noqa: T201 - that is the point
        os.write(1, b"louder\n")

    def swallows(self) -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(LONG_S)

    def interrupts(self) -> None:
        raise KeyboardInterrupt("as told")

    def deaf(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, signal.SIG_IGN)
        self.swallows()

    def huge(self) -> Any:
        return b"x" * (32 << 20)

    def rants(self) -> None:
        raise ValueError("x" * (32 << 20))

    def segfaults(self) -> None:
        ctypes.string_at(0)

    def closes(self) -> None:
        os.closerange(3, 1024)

    def babbles(self) -> None:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 64)
        time.sleep(LONG_S)

    def says_it_is_spent(self) -> None:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, frames.answer(0, 0.0, frames.SPENT))
        time.sleep(LONG_S)

    def recurses(self) -> None:
        self.recurses()

    def forks(self) -> None:
        os.fork()

    def leaves_children(self) -> None:
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import time; time.sleep({LONG_S})"])
        self._write(child.pid)
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
            self._write(os.getpid())
            time.sleep(LONG_S)
            os._exit(0)
        os.wait()

    def keeps_one(self) -> None:
        if not Path(self.pids).exists():
            self._write(subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import time; time.sleep({LONG_S})"]).pid)

    def leaves_thread(self) -> None:
        threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True).start()

    def leaves_children_and_hangs(self) -> None:
        self.leaves_children()
        time.sleep(LONG_S)

    def leaves_children_and_dies(self) -> None:
        self.leaves_children()
        while len(Path(self.pids).read_text().split()) < 2:
            time.sleep(0.01)
        os._exit(0)

    def kills_its_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG_S)

    def _write(self, pid: int) -> None:
        with Path(self.pids).open("a") as file:
            file.write(f"{pid}\n")
