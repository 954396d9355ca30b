"""The storage port: where finished and unfinished groups are made durable.

Invariant: `save` returns once the group would survive what the storage promises to survive; until then the group
counts as in flight, so that a pause sees a put that is under way.
"""

from __future__ import annotations

from typing import Protocol

from rollout_svc.group import Group

__all__ = ["MemoryStorage", "Storage"]


class Storage(Protocol):
    """Makes groups durable."""

    async def save(self, group: Group) -> None:
        """Record a group whose members are all COMPLETED."""

    async def close(self) -> None:
        """Write what is left and close; idempotent."""


class MemoryStorage:
    """Nothing survives the process: the group object itself is the record."""

    async def save(self, group: Group) -> None:
        """Promise nothing, at once."""

    async def close(self) -> None:
        """Do nothing."""
