"""What the allocators of this process say of themselves.

Invariant: asking costs microseconds, and allocates nothing that is counted.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any, Final, NamedTuple

__all__ = ["Heap", "heap"]

_BLOCK_BYTES: Final = 64
"""Mean size of a block of Python's own allocator, which counts blocks and not bytes: a tuple of two, a short string."""


class Heap(NamedTuple):
    """Bytes of the heap.

    Attributes:
        used: given out: by malloc, where large objects, arrays and tensors lie; and by Python's allocator for small
            objects, of which the number is known and the mean size assumed.
        free: freed, and kept by malloc: where this grows, the heap is in fragments, or has too many arenas. None: this
            C library does not say.
    """

    used: int
    free: int | None


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later; sums over all arenas (`malloc/malloc.c`, `__libc_mallinfo2`)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def heap() -> Heap:
    """What is in use, and what is kept free."""
    small = sys.getallocatedblocks() * _BLOCK_BYTES
    ask = _asked()
    if ask is None:
        return Heap(small, None)
    info = ask()
    return Heap(small + int(info.uordblks) + int(info.hblkhd), int(info.fordblks))


@lru_cache(maxsize=1)
def _asked() -> Any:
    """The C library's function; None where there is none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _MallInfo
    return function
