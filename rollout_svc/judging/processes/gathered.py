"""The processes that judgers leave behind in a judge process, which adopts them: ended before they are many.

Invariants:

- A process that a judger started once, and keeps, is left alone.
- A judger, or a tool, that leaves another at call after call has all of them ended, and buried, every `TIMES` calls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Final

__all__ = ["TIMES", "Gathered"]

TIMES: Final = 8
"""Calls that left a process more than there were, after which there are too many."""
_ROUNDS: Final = 8  # of killing: what a killed one had started is adopted, and killed in the next


class Gathered:
    """Counts the children of this process from call to call."""

    def __init__(self) -> None:
        self._had = 0
        self._grown = 0

    def look(self) -> None:
        """See what the last call has left, and end all of them where it goes on and on."""
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
