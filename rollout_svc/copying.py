"""Many tensors copied at once: a few threads, each with an equal share of the bytes.

`torch` copies each tensor with all of its threads, which wait for each other at the end of each: beside other processes
300 tensors cost 300 such waits, of milliseconds. Here there is one wait, at the end of all.

Invariants:

- Every byte is copied exactly once; when the call returns, or raises, no thread of it is left.
- Whatever a copy of bytes cannot do (strides, another dtype, another device) `torch` does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "copy_all", "shares"]

MAX_THREADS: Final = 4
"""More do not make memory faster."""
BYTES_A_THREAD: Final = 8 * 2**20
"""Fewest that are worth one: a few hundred microseconds of copying."""


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

    def copy(share: Sequence[Piece]) -> None:
        for place, start, end in share:
            target, source = addresses[place]
            ctypes.memmove(target + start, source + start, end - start)  # others run meanwhile: it lets the GIL go

    count = min(MAX_THREADS, len(os.sched_getaffinity(0)), max(sum(sizes) // BYTES_A_THREAD, 1))
    own, *others = shares(sizes, count)
    if not others:
        copy(own)
        return
    with ThreadPoolExecutor(len(others), thread_name_prefix="copying") as threads:
        copying = [threads.submit(copy, share) for share in others]
        copy(own)
        for one in copying:
            one.result()


def shares(sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Divide tensors of so many bytes each into `count` shares that differ by less than `count` bytes; pure."""
    total = sum(sizes)
    bounds = [total * number // count for number in range(1, count + 1)]
    divided: list[list[Piece]] = [[] for _ in range(count)]
    at = number = 0
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            while bounds[number] == at:
                number += 1
            end = min(size, start + bounds[number] - at)
            divided[number].append(Piece(place, start, end))
            at, start = at + end - start, end
    return divided


def _is_copy_of_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.dtype is source.dtype
        and target.shape == source.shape
        and all(
            tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            for tensor in (target, source)
        )
    )
