"""What a run left running: tasks, jobs in threads, threads, processes.

Invariants:

- What ends by itself within a moment is not counted.
- What was told is ended where it can be, and not told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout_svc.checking import places
from rollout_svc.checking.clock import CheckLoop

__all__ = ["MOMENT_S", "Before", "Left", "children", "left_since", "lives", "wardens"]

MOMENT_S: Final = 0.5
"""Seconds of real time: what takes longer to end was left running."""
_LOOK_S: Final = 0.01
_COMMAND: Final = 80  # characters of a command that are told
_OURS: Final = ("rollout_svc.judging.processes", "multiprocessing.resource_tracker")
"""In the commands of processes that are not the plugin's."""
_TURNS: Final = 5  # of the loop, for tasks that have been cancelled to end


@dataclass(frozen=True, slots=True)
class Left:
    """One thing, in words, and where it is."""

    what: str
    where: str = ""


class Before:
    """What there was before a run."""

    __slots__ = ("children", "jobs", "tasks", "threads")

    def __init__(self, loop: CheckLoop) -> None:
        self.tasks = asyncio.all_tasks(loop)
        self.jobs = set(loop.jobs)
        self.threads = set(loop.foreign_threads())
        self.children = set(children())


async def left_since(before: Before, loop: CheckLoop, known: Iterable[asyncio.Task[Any]] = ()) -> list[Left]:
    """Name what is there and was not before, wait a moment for it to end, and end what did not."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    end = time.monotonic() + MOMENT_S
    ours = {asyncio.current_task(), *known} | before.tasks
    while True:
        tasks = [task for task in asyncio.all_tasks(loop) if task not in ours]
        jobs = [job for job in loop.jobs if job not in before.jobs]
        threads = [thread for thread in loop.foreign_threads() if thread not in before.threads]
        processes = [pid for pid in children() if pid not in before.children]
        waitable = jobs or threads or processes
        if not waitable or time.monotonic() >= end:
            break
        time.sleep(_LOOK_S)  # noqa: ASYNC251 - the loop's own clock would jump
        await asyncio.sleep(0)
    found = [Left(f"the task {task.get_name()!r} runs on", places.of_suspended(task.get_coro())) for task in tasks]
    found += [Left(f"a thread still runs {loop.jobs[job]}(), and no thread can be ended") for job in jobs]
    found += [Left(f"the thread {thread.name!r} runs on") for thread in threads]
    found += [Left(f"the process {pid} ({_command(pid)}) runs on") for pid in processes]
    for task in tasks:
        task.cancel()
    for job in jobs:
        loop.jobs.pop(job, None)
    loop.own_threads.update(threads)
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found


def children(of: int | None = None) -> list[int]:
    """Processes right below this one, but for ours, or below another; none where the system cannot say."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{of or os.getpid()}/task").iterdir():
            found += map(int, (thread / "children").read_text(encoding="ascii").split())
    except OSError:
        return []
    return [pid for pid in found if lives(pid) and (of is not None or not _is_ours(pid))]


def wardens() -> list[int]:
    """Processes of ours that look after those in which plugins run."""
    below = Path(f"/proc/{os.getpid()}/task")
    pids = [int(pid) for thread in below.glob("*/children") for pid in thread.read_text(encoding="ascii").split()]
    return [pid for pid in pids if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    return any(word in _command(pid, whole=True) for word in _OURS)


def lives(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: int, *, whole: bool = False) -> str:
    try:
        told = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
    return told if whole else told[:_COMMAND]
