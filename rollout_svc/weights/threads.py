"""Work on weights beside the event loop.

Invariant: when the call returns, or raises, no thread is at it any more: what it wrote to may be written over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["off_loop"]

T = TypeVar("T")


async def off_loop(work: Callable[[], T]) -> T:
    """Do it in a thread; where the caller is cancelled the thread is waited for."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
