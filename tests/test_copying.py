"""Many copies at once."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc import copying


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 50))
def test_every_byte_is_in_exactly_one_piece(sizes: list[int], most: int) -> None:
    """And no piece is empty, or larger than was asked for."""
    cut = list(copying.pieces(sizes, most))
    found = Counter((piece.place, byte) for piece in cut for byte in range(piece.start, piece.end))
    assert found == {(place, byte): 1 for place, size in enumerate(sizes) for byte in range(size)}
    assert all(0 < piece.end - piece.start <= most for piece in cut)


@pytest.mark.parametrize("bytes_a_thread", [1, 2**30])
def test_tensors_of_every_kind_are_copied(monkeypatch: pytest.MonkeyPatch, bytes_a_thread: int) -> None:
    """One thread or several: strides, lazy conjugates, other dtypes, no dimension, no elements, and gradients."""
    monkeypatch.setattr(copying, "BYTES_A_THREAD", bytes_a_thread)
    monkeypatch.setattr(copying, "PIECE_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    grid = torch.arange(15000, dtype=torch.float32).view(100, 150)
    sources = [
        *(grid, grid.t(), grid[::2], grid.bfloat16(), torch.complex(grid, grid).conj(), torch.tensor(3.5)),
        *(torch.empty(0, 4), torch.nn.Parameter(grid + 1)),
    ]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    targets[3] = targets[3].double()
    copying.copy_all([*zip(targets, sources, strict=True)])
    assert all(
        torch.equal(target, source.detach().to(target.dtype)) for target, source in zip(targets, sources, strict=True)
    )


def test_nothing_to_copy_is_copied() -> None:
    """An empty list is fine."""
    copying.copy_all([])
