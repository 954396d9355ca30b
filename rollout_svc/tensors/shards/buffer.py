"""The fetch buffer: what this process has fetched, and is fetching, so that nothing is fetched twice and nothing stays.

One per process. **At step end every process that could have cached a shard drains it**: this is where that happens.

Invariants:

- One flight per id: of any number of callers that want a shard which is not here, one fetches it, the others wait.
- A drained id is not here: not from before, not by a fetch that was under way (its flight is marked), not by one that
  begins later, as long as its tombstone stands. Whoever waits for such a fetch gets the tensor; it is not kept.
- Tombstones are bounded by number and by age, the oldest go first. What a fetch under way does never depends on them.
- Never more bytes than the cap: the least recently used go first. What is being waited for is not an entry yet, and
  what was given out belongs to whom it was given: neither can be evicted.
- The lock is held for `SLICE` ids at a time at the most; tensors are let go of outside it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from threading import Lock
from typing import Any, Final, NamedTuple

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.shards.slices import SLICE, slices

__all__ = ["NAMED", "BufferStats", "Claim", "Drained", "FetchBuffer", "Flight"]

MAX_BYTES: Final = 4 * 2**30
TOMBSTONES: Final = 131_072
"""Ids remembered as drained: a large step's worth; some 20 MB."""
TOMBSTONE_S: Final = 600.0
"""How long a drained id is remembered, in seconds: longer than any fetch of a straggler takes."""
NAMED: Final = 8
"""Ids that statistics name, for those who look for a leak."""


class BufferStats(NamedTuple):
    """Figures of a fetch buffer.

    Attributes:
        entries: tensors that are kept.
        bytes: of those.
        flights: fetches under way.
        hits: wanted and kept.
        joined: wanted while somebody else was fetching it.
        misses: wanted and fetched.
        evicted: let go of for want of room.
        late: fetched, but not kept, since it was drained meanwhile or before.
        too_big: fetched, but larger than the cap.
        drained: entries that a drain or a flush removed.
        tombstones: ids remembered as drained.
        ids: a few of the entries, oldest first.
    """

    entries: int
    bytes: int
    flights: int
    hits: int
    joined: int
    misses: int
    evicted: int
    late: int
    too_big: int
    drained: int
    tombstones: int
    ids: tuple[str, ...]


class Drained(NamedTuple):
    """What a drain found: entries that it removed, and their bytes."""

    entries: int
    bytes: int


class Flight:
    """One fetch under way.

    Attributes:
        id: of the shard.
        keep: whether it is kept when it lands; False once it was drained.
        flushes: how many there had been when it began; it is not kept when there was another one since.
        done: resolved with the tensor, or with the failure.
    """

    __slots__ = ("done", "flushes", "id", "keep")

    def __init__(self, shard_id: str, *, keep: bool, flushes: int) -> None:
        self.id = shard_id
        self.keep = keep
        self.flushes = flushes
        self.done: Future[Any] = Future()


class Claim(NamedTuple):
    """What a caller who wants shards finds.

    Attributes:
        here: those that are kept, by id; to be lent on.
        joined: those that others are fetching.
        mine: those that this caller has to fetch, and to `land` or `fail`, whatever happens.
    """

    here: dict[str, Any]
    joined: dict[str, Flight]
    mine: dict[str, Flight]


class FetchBuffer:
    """Keeps what was fetched until it is drained; thread-safe. See the module's invariants.

    Args:
        max_bytes: the cap.
        max_tombstones: ids remembered as drained.
        tombstone_s: for how long, in seconds.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        max_tombstones: int = TOMBSTONES,
        tombstone_s: float = TOMBSTONE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_tombstones = max_tombstones
        self._tombstone_s = tombstone_s
        self._clock = clock
        self._lock = Lock()
        self._entries: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._flights: dict[str, Flight] = {}
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # id: when it goes; in the order of going
        self._bytes = 0
        self._flushes = 0
        self._hits = self._joined = self._misses = self._evicted = self._late = self._too_big = self._drained = 0

    def __repr__(self) -> str:
        return f"<FetchBuffer {len(self._entries)} tensors, {self._bytes} bytes, {len(self._flights)} under way>"

    def claim(self, ids: Iterable[str]) -> Claim:
        """Say who has, who fetches, and who is to fetch each of these shards; the last is the caller for the rest.

        Args:
            ids: without duplicates.
        """
        here: dict[str, Any] = {}
        joined: dict[str, Flight] = {}
        mine: dict[str, Flight] = {}
        for some in slices(ids):
            with self._lock:
                now = self._clock()
                for shard_id in some:
                    if (entry := self._entries.get(shard_id)) is not None:
                        self._entries.move_to_end(shard_id)
                        here[shard_id] = entry[0]
                        self._hits += 1
                    elif (flight := self._flights.get(shard_id)) is not None:
                        joined[shard_id] = flight
                        self._joined += 1
                    else:
                        keep = self._tombstones.get(shard_id, now) <= now
                        mine[shard_id] = self._flights[shard_id] = Flight(shard_id, keep=keep, flushes=self._flushes)
                        self._misses += 1
        return Claim(here, joined, mine)

    def land(self, flight: Flight, tensor: Any, nbytes: int) -> None:
        """Hand a fetched tensor to all who wait for it, and keep it unless it was drained.

        Args:
            flight: from `claim`.
            tensor: read by nobody but through what is lent of it.
            nbytes: its size.
        """
        gone: list[Any] = []
        with self._lock:
            self._end(flight)
            if not flight.keep or flight.flushes != self._flushes:
                self._late += 1
            elif nbytes > self.max_bytes:
                self._too_big += 1
            else:
                while self._bytes + nbytes > self.max_bytes:
                    _, (evicted, size) = self._entries.popitem(last=False)
                    self._bytes -= size
                    self._evicted += 1
                    gone.append(evicted)
                self._entries[flight.id] = (tensor, nbytes)
                self._bytes += nbytes
        flight.done.set_result(tensor)
        gone.clear()

    def fail(self, flight: Flight, failure: ShardFailure) -> None:
        """Tell all who wait for a shard that its fetch failed."""
        with self._lock:
            self._end(flight)
        flight.done.set_exception(failure)

    def _end(self, flight: Flight) -> None:
        if self._flights.get(flight.id) is flight:
            del self._flights[flight.id]

    def drain(self, ids: Iterable[str]) -> Drained:
        """Remove these shards and remember them as drained; idempotent, and ids that are not here are as good as any.

        Args:
            ids: of any number; the lock is held for a few of them at a time.
        """
        entries = size = 0
        for some in slices(ids):
            gone: list[Any] = []
            with self._lock:
                now = self._clock()
                for shard_id in some:
                    if (entry := self._entries.pop(shard_id, None)) is not None:
                        gone.append(entry[0])
                        entries += 1
                        size += entry[1]
                        self._bytes -= entry[1]
                        self._drained += 1
                    if (flight := self._flights.get(shard_id)) is not None:
                        flight.keep = False
                    self._tombstones.pop(shard_id, None)
                    self._tombstones[shard_id] = now + self._tombstone_s
                self._bury(now, len(some))
            gone.clear()
            time.sleep(0)  # a lock of Python is not fair: whoever waits for it needs the interpreter as well
        return Drained(entries, size)

    def flush_all(self) -> Drained:
        """Remove everything, and keep nothing of what is under way; leaves no tombstones."""
        with self._lock:
            gone, self._entries = self._entries, OrderedDict()
            found = Drained(len(gone), self._bytes)
            self._bytes = 0
            self._drained += found.entries
            self._flushes += 1
        gone.clear()
        return found

    def stats(self) -> BufferStats:
        """Return the figures of this moment."""
        with self._lock:
            self._bury(self._clock(), SLICE)
            return BufferStats(
                len(self._entries),
                self._bytes,
                len(self._flights),
                self._hits,
                self._joined,
                self._misses,
                self._evicted,
                self._late,
                self._too_big,
                self._drained,
                len(self._tombstones),
                tuple(islice(self._entries, NAMED)),
            )

    def _bury(self, now: float, at_most: int) -> None:
        """Forget tombstones that are too old or too many; as many as may have been added, so that it keeps up."""
        for _ in range(2 * at_most):
            first = next(iter(self._tombstones.items()), None)
            if first is None or (first[1] > now and len(self._tombstones) <= self._max_tombstones):
                return
            del self._tombstones[first[0]]
