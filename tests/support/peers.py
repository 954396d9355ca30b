"""Processes of shards as a controller knows them, without processes: what each is asked is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_svc.tensors.rtensor import RTensor
from rollout_svc.tensors.shards import Meta, Plane, Shard

__all__ = ["DirectPeer", "FakePeer", "remote", "stats_of"]


def remote(shard_id: str, owner: str = "http://owner") -> RTensor:
    """A remote tensor that nobody has to have made."""
    return RTensor(Shard(shard_id, owner, 4), Meta((1,), "float32", "numpy"))


def stats_of(*cached: str, owned: Sequence[str] | None = None, incarnation: str = "1") -> dict[str, Any]:
    """What a data plane answers that holds these, 10 bytes each."""

    def account(ids: Sequence[str]) -> dict[str, Any]:
        return {"entries": len(ids), "bytes": 10 * len(ids), "ids": list(ids), "expired": 0}

    owner = None if owned is None else account(owned)
    return {"process": 1, "incarnation": incarnation, "owner": owner, "buffer": account(cached)}


class FakePeer:
    """A process that holds what it is told to, and fails as it is told to.

    Attributes:
        asked: every order, as (verb, ids).
        failures: errors to be raised by the next orders, one each.
        hangs: orders do not end.
        deaf: nor does a cancellation end them.
        stats_error: raised when it is asked for its figures.
        told: what it answers then.
    """

    def __init__(self, incarnation: str = "1") -> None:
        self.incarnation = incarnation
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.renewed: list[tuple[float, tuple[str, ...]]] = []
        self.failures: list[Exception] = []
        self.hangs = False
        self.deaf = False
        self.stats_error: Exception | None = None
        self.told: Mapping[str, Any] | None = None

    def ids(self, verb: str = "drain") -> list[tuple[str, ...]]:
        """What it was asked under one verb."""
        return [ids for asked, ids in self.asked if asked == verb]

    async def drain(self, ids: Sequence[str]) -> str | None:
        return await self._ordered("drain", ids)

    async def drop(self, ids: Sequence[str]) -> str | None:
        return await self._ordered("drop", ids)

    async def flush(self) -> str | None:
        return await self._ordered("flush", ())

    async def renew(self, ids: Sequence[str]) -> str | None:
        self.renewed.append((asyncio.get_running_loop().time(), tuple(ids)))
        return self.incarnation

    async def stats(self) -> Mapping[str, Any]:
        if self.stats_error is not None:
            raise self.stats_error
        return stats_of(incarnation=self.incarnation) if self.told is None else self.told

    async def _ordered(self, verb: str, ids: Sequence[str]) -> str | None:
        assert all(type(shard_id) is str for shard_id in ids), "ids travel, never tensors"
        self.asked.append((verb, tuple(ids)))
        while self.hangs:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
        if self.failures:
            raise self.failures.pop(0)
        return self.incarnation


class DirectPeer:
    """The plane of a real owner and buffer, called in the loop: for virtual time, which knows no threads."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    async def drain(self, ids: Sequence[str]) -> str | None:
        self.plane.drain(list(ids))
        return self.plane.incarnation

    async def drop(self, ids: Sequence[str]) -> str | None:
        self.plane.drop(list(ids))
        return self.plane.incarnation

    async def flush(self) -> str | None:
        self.plane.flush()
        return self.plane.incarnation

    async def renew(self, ids: Sequence[str]) -> str | None:
        self.plane.renew(list(ids))
        return self.plane.incarnation

    async def stats(self) -> Mapping[str, Any]:
        return self.plane.stats()
