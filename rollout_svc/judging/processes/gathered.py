"""The processes and threads that judgers leave behind in a judge process: ended before they are many.

A process is adopted by it, and can be ended; a thread cannot, but for ending the process that it is in.

Invariants:

- A process that a judger started once, and keeps, is left alone.
- A judger, or a tool, that leaves another at call after call has all of them ended, and buried, every `TIMES` calls.
- Threads are let be while there are no more than `MOST_THREADS`: a pool of them is kept, and grows to its size.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Final

__all__ = ["MOST_THREADS", "TIMES", "Gathered"]

TIMES: Final = 8
"""Calls that left a process more than there were, after which there are too many."""
MOST_THREADS: Final = 64
"""Threads of Python's that a judge process may have: more than a judger has use for."""
_ROUNDS: Final = 8  # of killing: what a killed one had started is adopted, and killed in the next


class Gathered:
    """Counts the children and threads of this process from call to call."""

    def __init__(self) -> None:
        self._had = 0
        self._grown = 0
        self._most_threads = MOST_THREADS
        self._threads_grown = 0

    def look(self) -> bool:
        """See what the last call has left, and end the processes where it goes on and on.

        Returns:
            Whether it goes on and on with threads: this process is to end.
        """
        self._look_at_children()
        if (threads := threading.active_count()) > self._most_threads:
            self._most_threads = threads
            self._threads_grown += 1
        return self._threads_grown >= TIMES

    def _look_at_children(self) -> None:
        children = _children()
        self._grown += len(children) > self._had
        self._had = len(children)
        if self._grown < TIMES:
            return
        for _ in range(_ROUNDS):
            for pid in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            if not (children := _children()):
                break
        self._had, self._grown = len(children), 0


def _children() -> list[int]:
    """Of all threads of this process; none where the system does not tell."""
    if sys.platform != "linux":
        return []
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # tells at once that there is none, as mostly
    except ChildProcessError:
        return []
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - it is looked at often
            with open(f"/proc/self/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found
