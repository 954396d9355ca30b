"""What a process holds, by its own and the kernel's count: tasks, descriptors, sockets, children.

- Counted before and after; whatever is more afterwards was left behind.
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Held", "children", "held", "resident_bytes"]

_FILES = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Held:
    """Counts at one moment; `files` by kind: `socket`, `pipe`, `anon_inode`, or a path."""

    tasks: frozenset[asyncio.Task[object]]
    files: Counter[str]

    def __sub__(self, before: Held) -> dict[str, object]:
        """What is here and was not there before; empty where nothing is."""
        more: dict[str, object] = {
            "tasks": self.tasks - before.tasks,
            "files": self.files - before.files,
        }
        return {name: found for name, found in more.items() if found}


def held() -> Held:
    """Count, in a running loop or outside of one."""
    gc.collect()  # a socket that only a dead cycle holds is not left behind
    try:
        tasks = frozenset(asyncio.all_tasks())
    except RuntimeError:
        tasks = frozenset()
    return Held(tasks, Counter(_kinds()))


def _kinds() -> list[str]:
    kinds = []
    for entry in _FILES.iterdir():
        try:
            kinds.append(str(entry.readlink()).partition(":")[0])
        except FileNotFoundError:  # the descriptor this list is read through
            continue
    return kinds


def children() -> list[int]:
    """Processes of ours that have not ended, or were not waited for."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
