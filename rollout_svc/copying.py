"""Many tensors copied at once: by a few threads, each of which takes the next piece until there is none.

`torch` copies each tensor with all of its threads, which wait for each other at the end of each: beside other processes
300 tensors cost 300 such waits, of milliseconds. Here there is one wait, at the end of all.

Invariants:

- Every byte is copied exactly once; when the call returns, or raises, no thread of it is left.
- Whatever a copy of bytes cannot do (strides, another dtype, another device) `torch` does.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "copy_all", "pieces"]

MAX_THREADS: Final = 4
"""More do not make memory faster."""
BYTES_A_THREAD: Final = 8 * 2**20
"""Fewest that are worth one: a few hundred microseconds of copying."""
PIECE_BYTES: Final = 4 * 2**20
"""Small, so that a thread that others keep from its core leaves the rest to the next; large beside the taking."""


class Piece(NamedTuple):
    """Bytes `[start, end)` of one of the tensors."""

    place: int
    start: int
    end: int


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, which has its shape; no two overlap.

    The first are written without autograd's knowledge.
    """
    sizes: list[int] = []
    addresses: list[tuple[int, int]] = []
    for target, source in pairs:
        if _is_copy_of_bytes(target, source):
            sizes.append(source.nbytes)
            addresses.append((target.data_ptr(), source.data_ptr()))
        else:
            target.detach().copy_(source.detach())

    left = deque(pieces(sizes, PIECE_BYTES))

    def copy() -> None:
        while True:
            try:
                place, start, end = left.popleft()
            except IndexError:
                return
            target, source = addresses[place]
            ctypes.memmove(target + start, source + start, end - start)  # others run meanwhile: it lets the GIL go

    count = min(MAX_THREADS, len(os.sched_getaffinity(0)), sum(sizes) // BYTES_A_THREAD)
    if count <= 1:
        copy()
        return
    with ThreadPoolExecutor(count - 1, thread_name_prefix="copying") as threads:
        copying = [threads.submit(copy) for _ in range(count - 1)]
        copy()
        for one in copying:
            one.result()


def pieces(sizes: Sequence[int], most: int) -> Iterator[Piece]:
    """Cut tensors of so many bytes each into pieces of `most` bytes; pure."""
    for place, size in enumerate(sizes):
        for start in range(0, size, most):
            yield Piece(place, start, min(start + most, size))


def _is_copy_of_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.dtype is source.dtype
        and target.shape == source.shape
        and all(
            tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            for tensor in (target, source)
        )
    )
