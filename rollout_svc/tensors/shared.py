"""Tensors in POSIX shared memory: outside of this process's heap, to be read by others on this machine by their name.

Invariants:

- Room is reserved before a byte is written: where there is none `put` says so, and nobody is killed by a write later.
- A tensor's name goes with its owner: when it is freed, when the store is closed, and, where the process was killed
  before it could, when the next store on this machine is made. A view that somebody has keeps the bytes until it goes.
- No tensor takes a descriptor, however many there are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollout_svc.tensors.mapping import mapped

__all__ = ["InSharedMemory", "SharedStore", "attach", "own_prefix", "sweep"]

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the system's own file system for it
_PREFIX: Final = "rollout-svc-"
_STARTED: Final = 19  # index in /proc/PID/stat, counted after the name, of the time a process was started


class InSharedMemory:
    """A tensor in shared memory.

    Attributes:
        name: of its segment; what `attach` needs, beside shape and dtype.
        shape: of the tensor.
        dtype: NumPy's name of its type.
    """

    __slots__ = ("_path", "_tensor", "dtype", "name", "shape")

    def __init__(self, path: Path, tensor: np.ndarray[Any, Any]) -> None:
        self.name = path.name
        self.shape: tuple[int, ...] = tensor.shape
        self.dtype = tensor.dtype.name
        self._path = path
        self._tensor: np.ndarray[Any, Any] | None = tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 once it was freed."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor where it lies; it cannot be written to."""
        if self._tensor is None:
            raise ValueError(f"{self.name} was freed")
        return self._tensor

    def later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """The tensor, when it is called."""
        tensor = self.view()
        return lambda: tensor

    def free(self) -> None:
        """Take its name away, and let go of it; idempotent."""
        if self._tensor is not None:
            self._tensor = None
            self._path.unlink(missing_ok=True)


class SharedStore:
    """Keeps tensors in shared memory."""

    name = "shared"

    def __init__(self, folder: Path = _FOLDER) -> None:
        """Make the store, and take away what killed processes of ours left in the folder.

        Raises:
            OSError: there is no such folder, or nothing can be written there.
        """
        self._folder = folder
        self._own = f"{own_prefix(_PREFIX)}{os.urandom(4).hex()}-"
        self._numbers = count()
        if not os.access(folder, os.W_OK):
            raise OSError(f"{folder} is not there, or cannot be written to: no shared memory")
        sweep(folder, _PREFIX)

    def put(self, tensor: np.ndarray[Any, Any]) -> InSharedMemory:
        """Copy a tensor there, any shape and dtype.

        Raises:
            OSError: there is no room for it.
        """
        path = self._folder / f"{self._own}{next(self._numbers)}"
        size = max(1, tensor.nbytes)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a page that is not there when it is written to is a SIGBUS
            with mmap.mmap(descriptor, size) as written:
                np.frombuffer(written, dtype=np.uint8)[: tensor.nbytes] = _bytes_of(tensor)
            seen = np.frombuffer(mapped(descriptor, size), dtype=tensor.dtype, count=tensor.size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return InSharedMemory(path, seen.reshape(tensor.shape))

    def close(self) -> None:
        """Take away every name that is left; idempotent."""
        for path in self._folder.glob(f"{self._own}*"):
            path.unlink(missing_ok=True)


def attach(name: str, shape: tuple[int, ...], dtype: str, folder: Path = _FOLDER) -> np.ndarray[Any, Any]:
    """Read a tensor of another process, where it lies: read-only, for as long as the result is held.

    Raises:
        FileNotFoundError: it was freed.
        ValueError: this is no name of a segment of ours, or it is smaller than shape and dtype say.
    """
    if not name.startswith(_PREFIX) or "/" in name:
        raise ValueError(f"{name!r} is no segment of this service")
    with (folder / name).open("rb") as file:
        seen = mapped(file.fileno(), os.fstat(file.fileno()).st_size)
    return np.frombuffer(seen, dtype=np.dtype(dtype), count=int(np.prod(shape))).reshape(shape)


def own_prefix(prefix: str) -> str:
    """Begin the names of this process's segments, so that others can tell when they are nobody's any more."""
    return f"{prefix}{os.getpid()}-{_started(os.getpid())}-{_namespace()}-"


def sweep(folder: Path, prefix: str) -> None:
    """Take away the segments, of those that begin with `prefix` and were named by `own_prefix`, of killed processes.

    Those of another container that shares the folder stay: who lives there cannot be seen from here.
    """
    for path in folder.glob(f"{prefix}*"):
        pid, _, rest = path.name.removeprefix(prefix).partition("-")
        started, _, rest = rest.partition("-")
        if not pid.isdigit() or rest.partition("-")[0] != _namespace():  # it is not of this prefix, or not of here
            continue
        if _started(int(pid)) != started:
            with contextlib.suppress(OSError):
                path.unlink()


def _bytes_of(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


@cache
def _namespace() -> str:
    """Who numbers the processes here; empty where the system does not say."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in clock ticks; another with the same number has another. Empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[_STARTED]
