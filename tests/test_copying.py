"""Many copies at once."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc import copying


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5))
def test_every_byte_is_in_exactly_one_share(sizes: list[int], count: int) -> None:
    """And the shares are as equal as whole bytes allow."""
    divided = copying.shares(sizes, count)
    found = Counter(
        (piece.place, byte) for share in divided for piece in share for byte in range(piece.start, piece.end)
    )
    assert found == {(place, byte): 1 for place, size in enumerate(sizes) for byte in range(size)}
    lengths = [sum(piece.end - piece.start for piece in share) for share in divided]
    assert len(lengths) == count
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("bytes_a_thread", [1, 2**30])
def test_tensors_of_every_kind_are_copied(monkeypatch: pytest.MonkeyPatch, bytes_a_thread: int) -> None:
    """One thread or several: strides, lazy conjugates, other dtypes, no dimension, no elements, and gradients."""
    monkeypatch.setattr(copying, "BYTES_A_THREAD", bytes_a_thread)
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
