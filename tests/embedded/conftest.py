"""What all tests of the engine run under."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# pytest-asyncio asks for the thread's loop around each test; unless one was set, even to none, Python then makes one
# that nobody closes.
asyncio.set_event_loop(None)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The engine computes with one thread; so do its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
