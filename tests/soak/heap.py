"""What this process holds of its memory, apart from what its allocator keeps for later.

Resident memory also grows because free memory is scattered over the arenas of the C library's threads: ever more
slowly, and by nobody's fault. What is in use does not.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from typing import NamedTuple

__all__ = ["Heap", "heap"]


class Heap(NamedTuple):
    """Memory that somebody holds.

    Attributes:
        bytes: given out by the C library and not given back; 0 where it does not say (it is not glibc).
        blocks: of Python's own allocator, which takes its memory from the system directly.
    """

    bytes: int
    blocks: int


def heap() -> Heap:
    """Collect garbage, and count what is left; some milliseconds."""
    gc.collect()
    return Heap(_in_use(), sys.getallocatedblocks())


def _in_use() -> int:
    """Bytes of all arenas, less what is free there, and of the mappings of single large blocks.

    Source: https://man7.org/linux/man-pages/man3/malloc_info.3.html.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return 0
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    told = (text.value or b"").decode()
    libc.free(text)
    total = told[told.rindex("</heap>") :]
    return _size(total, "system", "current") + _size(total, "total", "mmap") - _free(total)


def _free(total: str) -> int:
    return _size(total, "total", "fast") + _size(total, "total", "rest")


def _size(total: str, element: str, kind: str) -> int:
    found = re.search(rf'<{element} type="{kind}"[^>]* size="(\d+)"', total)
    return int(found.group(1)) if found else 0
