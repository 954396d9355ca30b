"""A buffer that an engine on this machine reads where it lies: POSIX shared memory, with a sequence lock for its event.

The segment begins with a page of which two counters are used, uint64 each, little-endian: `written`, odd while the
sender writes and raised by two with every bucket; `read`, what `written` was for the bucket the receiver loaded last.
The data follow. A call says which `written` it means: a receiver that finds another, before or after it has loaded,
read what was being overwritten, and has to refuse it.

Invariants:

- Room is reserved before a byte is written.
- What is written is whole when `written` is even.
- The name goes with the slab, or where its process was killed with the next one that is made on this machine; whoever
  mapped it keeps the bytes until it lets go.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from rollout_svc.tensors.shared import own_prefix, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["HEAD_BYTES", "PREFIX", "SharedSlab"]

HEAD_BYTES: Final = 4096
"""Of the page before the data."""
PREFIX: Final = "rollout-svc-weights-"
"""Of the names of segments: nothing else is ever mapped."""
_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the system's own file system for it


class SharedSlab:
    """A buffer in shared memory, written to here and read elsewhere; see the module's invariants.

    Attributes:
        name: of the segment.
        nbytes: of the data.
    """

    def __init__(self, nbytes: int, folder: Path = _FOLDER) -> None:
        """Reserve it.

        Raises:
            OSError: there is no room, or no shared memory.
        """
        sweep(folder, PREFIX)
        self.name = f"{own_prefix(PREFIX)}{os.urandom(4).hex()}"
        self.nbytes = nbytes
        self._path = folder / self.name
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEAD_BYTES + nbytes)
            self._inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, HEAD_BYTES + nbytes)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._counters: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(self._map, dtype="<u8", count=2)

    def __repr__(self) -> str:
        return f"<SharedSlab {self.name} {self.nbytes} bytes, written {self.written}, read {self.read}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def written(self) -> int:
        """Twice the number of buckets that were written; one more while another is."""
        return int(self._counters[0])

    @property
    def read(self) -> int:
        """What `written` was for the bucket the receiver loaded last."""
        return int(self._counters[1])

    @property
    def lost(self) -> bool:
        """Whether its name is gone, or is another's: whoever has not mapped it yet never will."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    @property
    def handle(self) -> dict[str, Any]:
        """What a receiver needs to map it, JSON."""
        return {"name": self.name, "bytes": self.nbytes}

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, 1-D, as items of `dtype`."""
        import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

        count = self.nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=HEAD_BYTES)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write a bucket: who reads meanwhile can tell. One that fails leaves `written` odd until the next is whole."""
        self._counters[0] = self.written | 1
        yield
        self._counters[0] = self.written + 1

    def close(self) -> None:
        """Take its name away; idempotent. The bytes go when nobody maps them any more."""
        self._path.unlink(missing_ok=True)
