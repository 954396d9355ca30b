"""What is in use, as the C library and Python count it."""

from __future__ import annotations

import ctypes

import pytest

from tests.soak.heap import heap

if not hasattr(ctypes.CDLL(None), "malloc_info"):
    pytest.skip("needs glibc", allow_module_level=True)


def test_what_is_held_is_counted_until_it_is_given_back() -> None:
    """Small blocks and large ones, of C and of Python."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    before = heap()
    small = [ctypes.c_void_p(libc.malloc(900)) for _ in range(2000)]
    large = ctypes.c_void_p(libc.malloc(64 * 2**20))
    held = [[number] for number in range(1000)]
    between = heap()
    assert between.bytes - before.bytes == pytest.approx(2000 * 912 + 64 * 2**20, rel=0.01)
    assert between.blocks - before.blocks >= len(held)
    for block in (*small, large):
        libc.free(block)
    del held, small
    assert abs(heap().bytes - before.bytes) < 200_000
