"""Fetching shards: who is asked for what, at once and in what portions.

Invariants:

- What is in the fetch buffer, or under way to it, is asked of nobody.
- Each owner is asked on its own, all owners at once; many small shards go in one request, and a request is for
  `BATCH_BYTES` at the most, or for one shard.
- A flight that was claimed ends: with the tensor or with a failure, whatever happens to the thread that claimed it.
- Everything ends by one deadline. What others fetch is waited for until then, and fetched anew if they gave up sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Final

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.buffer import FetchBuffer, Flight
from rollout_svc.tensors.shards.client import Client, Transport, Wanted, copied
from rollout_svc.tensors.shards.leaves import Blank, lend
from rollout_svc.tensors.shards.names import Meta, Shard
from rollout_svc.tensors.shards.owner import ShardOwner

__all__ = ["Fetcher", "Outcome"]

TIMEOUT_S: Final = 120.0
BATCH_BYTES: Final = 64 * 2**20
BATCH_SHARDS: Final = 1024
OWNERS_AT_ONCE: Final = 16
"""Asked at the same time, by all callers together."""

Outcome = Any  # a tensor, or the ShardFailure in its place


class Fetcher:
    """Fetches shards into the fetch buffer of this process, and lends them on; thread-safe.

    Args:
        buffer: of this process.
        token: bearer token of the data planes.
        local: an owner in this process, whose shards are read without a socket.
        transports: how owners are reached, by the scheme of their address; more than `http` and `ray`.
    """

    def __init__(
        self,
        buffer: FetchBuffer | None = None,
        *,
        token: str | None = None,
        local: ShardOwner | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self.buffer = buffer or FetchBuffer()
        self.client = Client(token)
        self.local = local
        self._token = token
        self._transports: dict[str, Transport] = {"http": self.client, **(transports or {})}
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"<Fetcher {self.buffer!r}>"

    def forked(self) -> Fetcher:
        """Make the fetcher of a child that was forked: the same settings, and nothing of what the parent has."""
        return Fetcher(FetchBuffer(max_bytes=self.buffer.max_bytes), token=self._token)

    def fetch(self, wanted: Iterable[tuple[Shard, Meta]], timeout_s: float = TIMEOUT_S) -> dict[str, Outcome]:
        """Have shards in this process.

        Args:
            wanted: what to fetch; the same shard any number of times.
            timeout_s: for all of them, in seconds.

        Returns:
            For each id its tensor, or the `ShardFailure` in its place.
        """
        deadline = time.monotonic() + timeout_s
        rest = {shard.id: (shard, meta) for shard, meta in wanted}
        found: dict[str, Outcome] = {}
        while rest:
            claim = self.buffer.claim(rest)
            found.update((shard_id, lend(tensor)) for shard_id, tensor in claim.here.items())
            self._fly([(*rest[shard_id], flight) for shard_id, flight in claim.mine.items()], deadline)
            again: dict[str, tuple[Shard, Meta]] = {}
            for shard_id, flight in (*claim.mine.items(), *claim.joined.items()):
                outcome = _outcome(flight, rest[shard_id][0], deadline)
                others = isinstance(outcome, ShardFailure) and outcome.reason == "timeout" and shard_id in claim.joined
                if others and time.monotonic() < deadline:  # whoever fetched it had less time than there is here
                    again[shard_id] = rest[shard_id]
                else:
                    found[shard_id] = outcome
            rest = again
        return found

    def _fly(self, flights: Sequence[tuple[Shard, Meta, Flight]], deadline: float) -> None:
        """Begin flights: each owner's in a thread, the last owner's in this one."""
        owners: dict[str, list[tuple[Wanted, Flight]]] = {}
        for shard, meta, flight in flights:
            try:
                owners.setdefault(shard.owner, []).append((Wanted(shard, Blank(meta, shard.nbytes)), flight))
            except (ShardFailure, ImportError) as error:  # ImportError: a tensor of torch, where there is no torch
                message = f"shard {shard.id}: {error}"
                self.buffer.fail(flight, ShardFailure("invalid", message, (shard.id,)))
        jobs = [(address, job) for address, job in owners.items() if job]
        for address, job in jobs[:-1]:
            try:
                self._pool().submit(self._ask, address, job, deadline)
            except RuntimeError as error:  # the interpreter ends
                self._fail([flight for _, flight in job], ShardFailure("unreachable", str(error)))
        for address, job in jobs[-1:]:
            self._ask(address, job, deadline)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(OWNERS_AT_ONCE, thread_name_prefix="shards")
            return self._threads

    def _ask(self, address: str, job: Sequence[tuple[Wanted, Flight]], deadline: float) -> None:
        """Fetch what one owner has, a portion at a time."""
        open_flights = {flight.id: flight for _, flight in job}
        try:
            fetch = self._transport(address)
            for batch in _batches(job):
                failures = fetch(address, [wanted for wanted, _ in batch], deadline)
                for (wanted, flight), failure in zip(batch, failures, strict=True):
                    if failure is None:
                        self.buffer.land(flight, wanted.blank.filled(), wanted.blank.nbytes)
                    else:
                        self.buffer.fail(flight, failure)
                    del open_flights[flight.id]
        except ShardFailure as failure:
            self._fail(list(open_flights.values()), failure)
        except BaseException as error:
            broken = ShardFailure("unreachable", f"{address}: the fetch was broken off by {error!r}")
            self._fail(list(open_flights.values()), broken)
            raise

    def _fail(self, flights: Sequence[Flight], failure: ShardFailure) -> None:
        for flight in flights:
            if not flight.done.done():
                self.buffer.fail(flight, ShardFailure(failure.reason, failure.message, (flight.id,)))

    def _transport(self, address: str) -> Callable[[str, Sequence[Wanted], float], list[ShardFailure | None]]:
        if self.local is not None and address == self.local.address:
            return self._read_locally
        scheme = address.partition(":")[0]
        if scheme == "ray" and scheme not in self._transports:
            from rollout_svc.tensors.shards.ray_plane import RayTransport  # noqa: PLC0415 - for those who have Ray

            self._transports[scheme] = RayTransport()
        if (transport := self._transports.get(scheme)) is None:
            raise ShardFailure("invalid", f"{address!r}: an owner is reached by {' or '.join(self._transports)}")
        return transport.fetch

    def _read_locally(self, _: str, wanted: Sequence[Wanted], __: float) -> list[ShardFailure | None]:
        failures: list[ShardFailure | None] = []
        for shard, blank in wanted:
            found = None if self.local is None else self.local.find(shard.id)
            if found is None:
                failures.append(ShardFailure("missing", f"shard {shard.id} ({shard.nbytes} bytes) here", (shard.id,)))
            elif found.meta != blank.meta:
                failures.append(ShardFailure("invalid", f"shard {shard.id} here is {found.meta}", (shard.id,)))
            else:
                failures.append(copied(shard, blank, found.data))
        return failures

    def close(self) -> None:
        """End its threads and connections, and let go of what was fetched; idempotent."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        self.client.close()
        self.buffer.flush_all()


def _outcome(flight: Flight, shard: Shard, deadline: float) -> Outcome:
    try:
        # asked for, not raised: raised here it would hold this frame, and so its flight, and so itself
        failure = flight.done.exception(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return ShardFailure("timeout", f"shard {shard.id} at {shard.owner} did not arrive in time", (shard.id,))
    if failure is None:
        return lend(flight.done.result())
    message = failure.message if isinstance(failure, ShardFailure) else repr(failure)
    reason = failure.reason if isinstance(failure, ShardFailure) else "unreachable"
    return ShardFailure(reason, message, (shard.id,))  # of this caller's own: it may be raised in several threads


def _batches(job: Sequence[tuple[Wanted, Flight]]) -> Iterator[list[tuple[Wanted, Flight]]]:
    batch: list[tuple[Wanted, Flight]] = []
    size = 0
    for item in job:
        nbytes = item[0].blank.nbytes
        if batch and (size + nbytes > BATCH_BYTES or len(batch) == BATCH_SHARDS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch
