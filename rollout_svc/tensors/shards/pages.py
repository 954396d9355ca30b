"""Memory for large tensors in large pages: a fault for each 2 MiB, and not for each 4 KiB.

Filling 64 MiB of memory that was never touched costs ten times as much as copying them, nearly all of it for page
faults; in large pages it costs a third of that.

Invariants:

- A hint and no more: where the kernel does not take it, everything works, and is slower.
- Nothing is touched: the memory is resident once it is written to.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any, Final

__all__ = ["PAGE_BYTES", "hinted", "slack"]

PAGE_BYTES: Final = 2 * 2**20
LARGE_BYTES: Final = 2 * PAGE_BYTES
"""What is smaller is left alone: the room for alignment would be worth more than the faults."""


def slack(nbytes: int) -> int:
    """How much more to take than `nbytes`, so that a part of it as long begins with a large page."""
    return PAGE_BYTES if nbytes >= LARGE_BYTES else 0


def hinted(address: int, nbytes: int) -> int:
    """Ask for large pages, and say how far from the address the part to be used begins.

    Args:
        address: of memory of `nbytes + slack(nbytes)` bytes.
        nbytes: of the part.
    """
    if not slack(nbytes):
        return 0
    offset = -address % PAGE_BYTES
    if (advise := _advise()) is not None:
        advise(address + offset, nbytes - nbytes % mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return offset


@functools.cache
def _advise() -> Callable[[int, int, int], Any] | None:
    """The system's `madvise`; None where there is none, or no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found.restype = ctypes.c_int
    advise: Callable[[int, int, int], Any] = found
    return advise
