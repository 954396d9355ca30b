"""Reads what processes have: memory from /proc and the allocators, files from the disk.

Invariants:

- It blocks, for a millisecond or some: it is called in a thread, never on the event loop.
- What cannot be read is left out; a process that ended has no record.
- Nothing is counted twice under one name: a tensor of shared memory that is mapped and named is there once.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from rollout_svc.observe.memory.foreign import RayBytes, TorchBytes
from rollout_svc.observe.memory.heap import heap

__all__ = ["CHILDREN", "OWN", "Probe"]

OWN: Final = "service"
"""The name of this process."""
CHILDREN: Final = "children"
"""The name of what this process started and nobody named: judges, and whatever a plugin runs."""
_KB: Final = 1024
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES: Final = 2000  # of a tree that are added up
_MOST_FILES: Final = 4096  # open files that are looked at
_STDERR: Final = 2  # and below: where a log goes is somebody else's business
_MEMORY_FILES: Final = ("/dev/shm/", "/memfd:")  # noqa: S108 - where files are memory


class Probe:
    """Reads this process, and those it started."""

    def __init__(
        self,
        files: Mapping[str, Sequence[str]] | None = None,
        *,
        accounts: Callable[[], Mapping[str, int]] = dict,
        tensors: bool = False,
        shared_prefix: str = "rollout-svc-",
        shared_folder: Path = Path("/dev/shm"),  # noqa: S108 - the system's own file system for it
    ) -> None:
        """Begin.

        Args:
            files: patterns of paths by account, as `glob` takes them: the files whose sizes are that account.
            accounts: what parts of this process count themselves, bytes by account (`tensors.accounts.tensor_bytes`).
            tensors: whether tensors on the CPU are looked for, which keeps what is released meanwhile for a moment.
            shared_prefix: what the names of this project's segments of shared memory begin with; the pid follows.
            shared_folder: where segments are.
        """
        self._files = {name: tuple(Path(pattern) for pattern in patterns) for name, patterns in (files or {}).items()}
        self._shared = (shared_folder, f"{shared_prefix}{os.getpid()}-*")
        self._accounts = accounts
        self._torch, self._ray = TorchBytes(look=tensors), RayBytes()

    @property
    def trouble(self) -> str:
        """Why Ray could not be asked; empty: it could, or is not there."""
        return self._ray.trouble

    def read(self, launched: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """What every process has, bytes by account.

        Args:
            launched: pids of named processes that this one started; what they started is added to them.

        Returns:
            This process under `service`; each named one that lives, `rss` only; the others under `children`.
        """
        known = self._known_files()
        found = {OWN: self._own() | {name: sum(sizes.values()) for name, sizes in known.items()}}
        found[OWN] |= self._accounts()
        found[OWN]["open_files"] = _open_files({place for sizes in known.values() for place in sizes})
        seen: set[int] = set()
        for name, pid in (launched or {}).items():
            tree = [one for one in _tree(pid) if one not in seen]
            seen.update(tree)
            if size := sum(_rss(one) for one in tree):
                found[name] = {"rss": size}
        others = [pid for pid in _tree(os.getpid()) if pid not in seen and pid != os.getpid()]
        found[CHILDREN] = {"rss": sum(_rss(pid) for pid in others)}
        return found

    def _own(self) -> dict[str, int]:
        found: dict[str, int] = {}
        status = _status()
        if "VmRSS" in status:
            found["rss"] = status["VmRSS"]
        used, free = heap()
        found["python_heap"] = used
        if free is not None:
            found["malloc_free"] = free
        folder, names = self._shared
        named = sum(size for _, size in _sizes(folder.glob(names)))
        found["shared_memory"] = max(named, status.get("RssShmem", 0))
        return found | self._torch.read() | self._ray.read()

    def _known_files(self) -> dict[str, dict[tuple[int, int], int]]:
        return {
            name: dict(_sizes(path for pattern in patterns for path in pattern.parent.glob(pattern.name)))
            for name, patterns in self._files.items()
        }


def _status() -> dict[str, int]:
    """Memory of this process, bytes, by the names of /proc/self/status."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value[:-3]) * _KB
    return found


def _sizes(paths: Iterable[Path]) -> Iterator[tuple[tuple[int, int], int]]:
    """Identity and bytes of each file."""
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield (found.st_dev, found.st_ino), found.st_size


def _open_files(known: set[tuple[int, int]]) -> int:
    """Bytes of files on disk that this process has open for writing, deleted ones too, and that no account has."""
    sizes: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for descriptor in islice(Path("/proc/self/fd").iterdir(), _MOST_FILES):
            with contextlib.suppress(OSError, ValueError):
                found = os.fstat(int(descriptor.name))
                place = (found.st_dev, found.st_ino)
                if not stat.S_ISREG(found.st_mode) or place in known or int(descriptor.name) <= _STDERR:
                    continue
                if _writes(descriptor.name) and not str(descriptor.readlink()).startswith(_MEMORY_FILES):
                    sizes[place] = found.st_size
    return sum(sizes.values())


def _writes(number: str) -> bool:
    """Whether a descriptor is open for writing."""
    for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _tree(pid: int) -> list[int]:
    """A process and all it started that lives."""
    found, place = [pid], 0
    while place < len(found) < _MOST_PROCESSES:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{found[place]}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += [int(child) for child in (thread / "children").read_text().split()]
        place += 1
    return found


def _rss(pid: int) -> int:
    """Resident memory of a process, bytes; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
