"""Storages for tests: puts that block, cling or fail, as the test says."""

from __future__ import annotations

import asyncio

from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.group import Group
from tests.support.bell import Bell

__all__ = ["Store"]


class Store(MemoryStorage):
    """Remembers what was saved.

    Attributes:
        block: saves wait for `go_on`.
        deaf: a save that is cancelled while it waits goes on waiting.
        fail: saves that still fail.
        flushing: set while a flush waits for `go_on`; flushes wait where it is not None.
    """

    def __init__(self, bell: Bell | None = None) -> None:
        self.bell = bell or Bell()
        self.go_on = asyncio.Event()
        self.block = False
        self.deaf = False
        self.fail = 0
        self.flushing: asyncio.Event | None = None
        self.saving = 0
        self.saved: list[str] = []
        self.closed = False

    async def save(self, group: Group) -> None:
        """Save, sooner or later or not at all."""
        self.saving += 1
        self.bell.ring()
        while self.block and not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.bell.ring()
                if not self.deaf:
                    raise
        if self.fail:
            self.fail -= 1
            raise OSError("the disk is full")
        self.saved.append(group.group_id)
        self.bell.ring()

    async def flush(self) -> None:
        """Wait, where the test says so."""
        if self.flushing is not None:
            self.flushing.set()
            await self.go_on.wait()

    async def close(self) -> None:
        """Close."""
        self.closed = True
