"""The data plane in Ray: owners that are actors, reached by name; the same calls as over HTTP.

Invariants:

- An ObjectRef never leaves the call that made it: what an owner answers is copied into the memory it is for, and the
  reference goes, and with it the object. What lies in Ray's object store for longer lies there under an owner's handle
  (`Store`).
- An owner that also consumes is one process with one fetch buffer: dropping its shards drains that as well.
- Leases end by themselves: an owner that nobody calls any more is the one whose shards nobody will clear.
- ray is imported where it is used.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.client import TIMEOUT_S, Wanted, copied
from rollout_svc.tensors.shards.leaves import describe, payload
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.owner import LEASE_S, MAX_BYTES, ShardOwner
from rollout_svc.tensors.shards.plane import MAX_RESPONSE_BYTES, SWEEP_S, Plane
from rollout_svc.tensors.shards.process import fetcher
from rollout_svc.tensors.store import StoreName, make_store

__all__ = ["RayKeeper", "RayOwner", "RayTransport", "address_of", "start_owner"]

SCHEME: Final = "ray:"
AT_ONCE: Final = 4
"""Calls that an owner started here answers at the same time."""


def address_of(name: str, namespace: str) -> str:
    """Return the address of an owner in Ray."""
    return f"{SCHEME}{namespace}/{name}"


class RayOwner:
    """An actor that owns shards: to be started as it is (`start_owner`), or inherited by an actor that does more.

    Args:
        name: of the actor.
        namespace: of the actor.
        store: where the bytes lie: in the actor, in its node's shared memory, in Ray's object store.
        max_bytes: of its shards.
        lease_s: see `ShardOwner`.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        *,
        store: StoreName = "memory",
        max_bytes: int = MAX_BYTES,
        lease_s: float = LEASE_S,
    ) -> None:
        address = address_of(name, namespace)
        self.shards = ShardOwner(address, store=make_store(store), max_bytes=max_bytes, lease_s=lease_s)
        consumer = fetcher()
        consumer.local = self.shards
        self._plane = Plane(self.shards, consumer.buffer)
        given = weakref.ref(self.shards), min(SWEEP_S, lease_s / 4)
        threading.Thread(target=_sweep, args=given, name="shards:sweep", daemon=True).start()

    def keep(self, meta: Meta, data: Any) -> tuple[Shard, Meta]:
        """Keep the bytes of a tensor of somebody else (`RayKeeper`). Errors as `ShardOwner.put`."""
        return self.shards.put_bytes(meta, np.array(data))  # what came lies in Ray's store, and is not to stay there

    def fetch(self, ids: list[str]) -> list[tuple[Meta, Any] | str]:
        """Return shards, as bytes; for one that is not there, or not to be had in one answer, its status."""
        answer: list[tuple[Meta, Any] | str] = []
        room = self._plane.max_response_bytes
        for shard_id in ids:
            found = self.shards.find(shard_id)
            if found is None:
                answer.append("missing")
            elif found.data.nbytes > MAX_RESPONSE_BYTES:
                answer.append("too_big")
            elif found.data.nbytes > room:
                answer.append("later")
            else:
                room -= found.data.nbytes
                answer.append((found.meta, found.data))
        return answer

    def call(self, call: str, ids: list[str] | None = None) -> dict[str, Any]:
        """Do what the data plane over HTTP does for `renew`, `drop`, `drain`, `flush` and `stats`."""
        plane = self._plane
        if ids is None:
            return {"flush": plane.flush, "stats": plane.stats}[call]()
        return {"renew": plane.renew, "drop": plane.drop, "drain": plane.drain}[call](ids)


def _sweep(owner: weakref.ref[ShardOwner], every_s: float) -> None:
    """Look at the leases for as long as the owner lives; in a thread."""
    while (held := owner()) is not None:
        held.expire()
        del held
        time.sleep(every_s)


def start_owner(name: str, namespace: str, **settings: Any) -> Any:
    """Start an actor that owns shards, on this node; it lives as long as the handle that is returned.

    Args:
        name: of the actor.
        namespace: of the actor.
        settings: of `RayOwner`.
    """
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    options = {"name": name, "namespace": namespace, "max_concurrency": AT_ONCE, "num_cpus": 0}
    return ray.remote(RayOwner).options(**options).remote(name, namespace, **settings)


class RayTransport:
    """Reaches owners in Ray; thread-safe."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def fetch(self, address: str, wanted: Sequence[Wanted], deadline: float) -> list[ShardFailure | None]:
        """See `Transport`."""
        failures: list[ShardFailure | None] = [None] * len(wanted)
        rest = list(range(len(wanted)))
        while rest:  # each answer brings some, until the deadline
            asked, rest = rest, []
            try:
                answers = self.ask(address, "fetch", ([wanted[index].shard.id for index in asked],), deadline)
            except ShardFailure as failure:
                for index in asked:
                    failures[index] = ShardFailure(failure.reason, failure.message, (wanted[index].shard.id,))
                break
            for index, answer in zip(asked, answers, strict=True):
                if answer == "later":
                    rest.append(index)
                else:
                    failures[index] = _land(address, wanted[index], answer)
        return failures

    def post(self, address: str, call: str, ids: Sequence[str] | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Tell an owner what to do with shards; as `Client.post`."""
        given = (call,) if ids is None else (call, list(ids))
        answer: dict[str, Any] = self.ask(address, "call", given, time.monotonic() + timeout_s)
        return answer

    def stats(self, address: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Ask an owner for its figures."""
        return self.post(address, "stats", None, timeout_s)

    def ask(self, address: str, method: str, given: tuple[Any, ...], deadline: float) -> Any:
        """Call a method of an owner.

        Raises:
            ShardFailure: its own; `timeout`; `unreachable`.
        """
        import ray  # noqa: PLC0415 - as above

        try:
            actor = self._actors.get(address) or self._found(address)
            return ray.get(getattr(actor, method).remote(*given), timeout=max(deadline - time.monotonic(), 0.0))
        except ShardFailure as failure:  # Ray's copy of it, which brings the owner's stack along
            raise ShardFailure(failure.reason, failure.message, failure.ids) from None
        except ray.exceptions.GetTimeoutError as error:
            raise ShardFailure("timeout", f"{address} did not answer {method} in time") from error
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: there is no actor of that name
            self._actors.pop(address, None)
            raise ShardFailure("unreachable", f"{address}: {method}: {error}") from error

    def _found(self, address: str) -> Any:
        import ray  # noqa: PLC0415 - as above

        if not ray.is_initialized():  # Ray would start a cluster of its own to look there
            raise ValueError("this process is not connected to a Ray cluster")
        namespace, _, name = address.removeprefix(SCHEME).rpartition("/")
        found = self._actors[address] = ray.get_actor(name, namespace or None)
        return found


class RayKeeper:
    """Where `remotize` stores tensors that an actor is to own; within the actor itself that is `shards`.

    Args:
        address: of the owner.
        timeout_s: for one tensor, in seconds.
    """

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._transport = RayTransport()

    def put(self, tensor: Any) -> tuple[Shard, Meta]:
        """Hand the bytes of a tensor over.

        Raises:
            ShardFailure: as `ShardOwner.put`; `unreachable`, `timeout`.
        """
        given = describe(tensor), payload(tensor)
        kept: tuple[Shard, Meta] = self._transport.ask(self.address, "keep", given, time.monotonic() + self._timeout_s)
        return kept

    def drop(self, ids: list[str]) -> dict[str, Any]:
        """Let go of tensors."""
        return self._transport.post(self.address, "drop", ids, self._timeout_s)


def _land(address: str, wanted: Wanted, answer: tuple[Meta, Any] | str) -> ShardFailure | None:
    """Copy one shard into its blank."""
    shard, blank = wanted
    if isinstance(answer, str):
        return ShardFailure(answer, f"shard {shard.id} ({shard.nbytes} bytes) at {address}", (shard.id,))
    meta, data = answer
    if meta != blank.meta or data.nbytes != blank.nbytes:
        seen = f"{data.nbytes} bytes, {meta}, where {blank.nbytes} bytes, {blank.meta} were expected"
        return ShardFailure("invalid", f"shard {shard.id} at {address} has {seen}", (shard.id,))
    return copied(shard, blank, data)
