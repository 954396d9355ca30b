"""A judger that watches, from within the service, which threads touch its heavy tensors.

- A thread counts as a loop's while a loop runs in it: whatever passes there holds up everything else of that loop.
- What is watched is where bytes are got at: reading a stored tensor, storing one, decoding one.
- The counts lie in files that the bench reads, one for each process: so nothing is asked of the service for them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import threading
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rollout_svc.tensors.ray_store import InRay, RayStore
from rollout_svc.tensors.store import InMemory, MemoryStore
from rollout_svc.workers import experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout_svc.judging import JudgedSample

__all__ = ["WATCHED", "Counts", "Judge", "read_counts"]

WATCHED: Final[tuple[tuple[Any, str], ...]] = (
    (InRay, "view"),
    (InMemory, "view"),
    (RayStore, "put"),
    (MemoryStore, "put"),
    (experts, "decode"),
)
"""Where bytes are got at; each returns something that knows how many."""
_FORM = struct.Struct("<QQ")


class Counts(NamedTuple):
    """Bytes of tensors so far.

    Attributes:
        in_loops: touched in a thread in which an event loop ran.
        elsewhere: touched in any other.
    """

    in_loops: int
    elsewhere: int


def read_counts(path: Path) -> Counts:
    """Read what judgers in other processes have counted, of all of them."""
    shown = [_FORM.unpack(one.read_bytes()[: _FORM.size]) for one in path.parent.glob(f"{path.name}.*")]
    return Counts(sum(in_loops for in_loops, _ in shown), sum(elsewhere for _, elsewhere in shown))


class Judge:
    """Says 1.0 of everything; made in the service's process, it watches there from then on.

    Args:
        counts: file for the counts, with the process's number behind it.
    """

    instant = True

    def __init__(self, counts: str) -> None:
        path = Path(f"{counts}.{os.getpid()}")
        path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._shown = mmap.mmap(file.fileno(), _FORM.size)
        self._counts = [0, 0]
        self._lock = threading.Lock()
        for where, name in WATCHED:
            setattr(where, name, self._watching(getattr(where, name)))

    def judge(self, sample: JudgedSample) -> float:
        """Say 1.0."""
        del sample
        return 1.0

    def _watching(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._count(int(result.nbytes))
            return result

        return watched

    def _count(self, nbytes: int) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            elsewhere = True
        else:
            elsewhere = False
        with self._lock:
            self._counts[elsewhere] += nbytes
            _FORM.pack_into(self._shown, 0, *self._counts)
