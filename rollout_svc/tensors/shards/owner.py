"""The owner of shards: it holds each of them under a handle, until it is told to drop it or its lease ends.

Invariants:

- A shard has one handle (kind `shard`), which is released exactly once: dropped, expired, or at the end of the owner.
- A lease is renewed by a fetch and by `renew`, and by nothing else: as long as somebody still reads a shard, or says
  that it will be read, it stays. One whose ids were lost with a crashed receiver is neither, and goes away.
- Never more bytes than the cap: what does not fit is refused, with the sizes, and nothing is evicted for it.
- The lock is held for `SLICE` ids at a time at the most; bytes are let go of outside it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count, islice
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np

from rollout_svc.errors import ShardFailure, SpentHandle
from rollout_svc.tensors.handle import Handle, Handles
from rollout_svc.tensors.shards.buffer import NAMED
from rollout_svc.tensors.shards.leaves import describe, payload
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.slices import SLICE, slices
from rollout_svc.tensors.store import MemoryStore, Store

__all__ = ["Dropped", "Found", "OwnerStats", "ShardOwner"]

MAX_BYTES: Final = 64 * 2**30
LEASE_S: Final = 3600.0
"""How long a shard stays that nobody reads: as long as a batch is leased."""


class OwnerStats(NamedTuple):
    """Figures of an owner.

    Attributes:
        entries: shards it holds.
        bytes: of those.
        put: shards there ever were.
        dropped: shards that were dropped.
        expired: shards whose lease ended.
        ids: a few of those it holds, the one that expires first in front.
    """

    entries: int
    bytes: int
    put: int
    dropped: int
    expired: int
    ids: tuple[str, ...]


class Dropped(NamedTuple):
    """What a drop found: shards that it removed, and their bytes."""

    entries: int
    bytes: int


class Found(NamedTuple):
    """A shard that is there: what it looks like, and its bytes, read-only, where they lie."""

    meta: Meta
    data: np.ndarray[Any, np.dtype[np.uint8]]


class _Held:
    __slots__ = ("ends_at", "handle", "meta")

    def __init__(self, handle: Handle, meta: Meta, ends_at: float) -> None:
        self.handle = handle
        self.meta = meta
        self.ends_at = ends_at


class ShardOwner:
    """Holds shards for whoever fetches them; thread-safe. See the module's invariants.

    Args:
        address: under which it is reached; may be set later, before the first `put`.
        handles: the account its handles are in.
        store: where the bytes lie.
        max_bytes: the cap.
        lease_s: how long a shard stays that is neither read nor renewed, in seconds.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        address: str = "",
        *,
        handles: Handles | None = None,
        store: Store | None = None,
        max_bytes: int = MAX_BYTES,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.max_bytes = max_bytes
        self.lease_s = lease_s
        self.handles = handles or Handles()
        self._store = store or MemoryStore()
        self._clock = clock
        self._lock = Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()  # in the order in which their leases end
        self._bytes = 0
        self._put = self._dropped = self._expired = 0
        self._prefix = secrets.token_hex(8)
        self._numbers = count(1)

    def __repr__(self) -> str:
        return f"<ShardOwner {self.address or 'nowhere'}: {len(self._held)} shards, {self._bytes} bytes>"

    def put(self, tensor: Any) -> tuple[Shard, Meta]:
        """Keep a tensor, of torch or NumPy; the caller writes to it no more. May block: on a device, on the store.

        Raises:
            ShardFailure: `full`: it does not fit; `invalid`: it is no tensor that has plain bytes.
        """
        return self.put_bytes(describe(tensor), payload(tensor))

    def put_bytes(self, meta: Meta, data: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Shard, Meta]:
        """Keep the bytes of a tensor; as `put`."""
        if not self.address:
            raise RuntimeError("an owner without an address gives out shards that nobody could fetch")
        self.expire()
        nbytes = data.nbytes
        with self._lock:
            if self._bytes + nbytes > self.max_bytes:
                held = f"{self._bytes} of {self.max_bytes} bytes are held in {len(self._held)} shards"
                raise ShardFailure("full", f"{nbytes} bytes do not fit at {self.address}: {held}")
            self._bytes += nbytes  # claimed, before what may block
        shard_id = f"{self._prefix}-{next(self._numbers):x}"
        try:
            handle = self.handles.hold(self._store.put(data), kind="shard", holder=shard_id)
        except BaseException as error:
            with self._lock:
                self._bytes -= nbytes
            if isinstance(error, Exception):  # of a store it means that there is no room
                raise ShardFailure("full", f"{nbytes} bytes do not fit at {self.address}: {error!r}") from error
            raise
        with self._lock:
            self._held[shard_id] = _Held(handle, meta, self._clock() + self.lease_s)
            self._put += 1
        return Shard(shard_id, self.address, nbytes), meta

    def find(self, shard_id: str) -> Found | None:
        """Return a shard, or None where it is not; renews its lease. May block, on the store."""
        self.expire()
        with self._lock:
            held = self._held.get(shard_id)
            if held is None:
                return None
            self._renew(shard_id, held)
        try:
            return Found(held.meta, held.handle.read())
        except SpentHandle:  # dropped since
            return None

    def renew(self, ids: Iterable[str]) -> int:
        """Begin the leases of these shards anew; return how many of them are there."""
        self.expire()
        renewed = 0
        for some in slices(ids):
            with self._lock:
                for shard_id in some:
                    if (held := self._held.get(shard_id)) is not None:
                        self._renew(shard_id, held)
                        renewed += 1
            time.sleep(0)  # as in the fetch buffer: let others have the lock
        return renewed

    def drop(self, ids: Iterable[str]) -> Dropped:
        """Let go of these shards; idempotent, and ids that are not here are as good as any."""
        entries = size = 0
        for some in slices(ids):
            gone: list[_Held] = []
            with self._lock:
                for shard_id in some:
                    if (held := self._held.pop(shard_id, None)) is not None:
                        gone.append(held)
                        self._bytes -= held.handle.nbytes
                        size += held.handle.nbytes
                self._dropped += len(gone)
            entries += len(gone)
            for held in gone:
                held.handle.release("a drop")
            time.sleep(0)
        return Dropped(entries, size)

    def expire(self) -> int:
        """Let go of the shards whose leases have ended; return how many. Called by everything else here."""
        expired = 0
        while gone := self._pop_expired():
            expired += len(gone)
            for held in gone:
                held.handle.release("the end of its lease")
        return expired

    def _pop_expired(self) -> list[_Held]:
        gone: list[_Held] = []
        with self._lock:
            now = self._clock()
            while len(gone) < SLICE and self._held:
                shard_id, held = next(iter(self._held.items()))
                if held.ends_at > now:
                    break
                del self._held[shard_id]
                self._bytes -= held.handle.nbytes
                gone.append(held)
            self._expired += len(gone)
        return gone

    def stats(self) -> OwnerStats:
        """Return the figures of this moment."""
        self.expire()
        with self._lock:
            ids = tuple(islice(self._held, NAMED))
            return OwnerStats(len(self._held), self._bytes, self._put, self._dropped, self._expired, ids)

    def close(self) -> None:
        """Let go of everything; idempotent."""
        with self._lock:
            ids = list(self._held)
        self.drop(ids)
        self._store.close()

    def _renew(self, shard_id: str, held: _Held) -> None:
        held.ends_at = self._clock() + self.lease_s
        self._held.move_to_end(shard_id)
