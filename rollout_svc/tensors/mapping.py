"""Files mapped to be read, without a descriptor for as long as they are.

The mapping of Python 3.11 and 3.12 keeps a descriptor of its file open: thousands of tensors would take those that
connections need.

Invariants:

- A mapping lives as long as somebody holds what was given out of it, or a view of that.
- It cannot be written to, nor be made writable.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import lru_cache
from typing import Any, Final
from weakref import finalize

__all__ = ["mapped"]

_FAILED: Final = ctypes.c_void_p(-1).value


def mapped(descriptor: int, size: int) -> memoryview:
    """Map the first bytes of a file; its descriptor may be closed at once.

    Args:
        descriptor: of the file.
        size: bytes, at least 1, and no more than the file has.

    Raises:
        OSError: it cannot be mapped.
    """
    system = _system()
    address = system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    held = (ctypes.c_uint8 * size).from_address(address)
    finalize(held, system.munmap, address, size).atexit = False
    return memoryview(held).cast("B").toreadonly()


@lru_cache(maxsize=1)
def _system() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    found.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return found
