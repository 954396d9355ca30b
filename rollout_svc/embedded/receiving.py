"""Weights that arrive in buckets through shared memory: the receiver's side.

Calls of one round follow each other: the first carries a buffer (the name of a segment) and its event (a sequence lock
at the segment's beginning), later ones may carry metadata alone, the last says `finished`. See `weights/persistent.py`
for what a sender has to send, and `weights/slab.py` for the segment.

Invariants:
- What is loaded is what the sender had written when it made the call, or the call is refused. A buffer left out is
  reused only where this receiver still has it, mapped and not a clone, with the dtype the metadata name.
- After a refusal nothing is kept: the next call has to carry the buffer again.
- At most one segment is mapped between rounds, the last one's; after a refusal none is.
- Nothing is unpickled, and no segment is mapped that is not one of a weight update.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from rollout_svc.spans import clash_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

HEAD_BYTES: Final = 4096
"""Of the page before the data; its first two uint64 are the counters `written` and `read`."""

PREFIX: Final = "rollout-svc-weights-"
"""Of the names of segments: nothing else is ever mapped."""

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the system's own file system for it
"""Where segments are."""


class BucketError(ValueError):
    """Raised when a bucket cannot be loaded as it was meant; nothing of it was."""


class EventError(BucketError):
    """Raised when the event of a buffer cannot be opened: the sender has to send without."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a buffer: `[start, end)`, in elements of the dtype or in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


class Receiver:
    """Takes the calls of one round after the other. Used by one thread at a time."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._segment: _Segment | None = None
        self._cloned = False
        self._mapped: _Mapping | None = None

    @property
    def registered(self) -> bool:
        """Whether a buffer is kept for later calls."""
        return self._segment is not None

    def receive(self, call: Mapping[str, Any], load: Callable[[list[tuple[str, torch.Tensor]]], object]) -> int:
        """Read one call, and return how many tensors it had.

        Args:
            call: as it came.
            load: copies tensors to where they belong; it is given names and views of the buffer, which others write to
                later, all those of the call.

        Raises:
            BucketError: the call cannot be honoured as it was meant; what was registered is dropped, and what was
                loaded by this call is worth nothing. What `load` raises likewise.
        """
        try:
            return self._receive(call, load)
        except BaseException:
            self.drop()
            raise

    def end(self) -> None:
        """Forget buffer and event: the round is over. Idempotent.

        The segment stays mapped for the next round that names it: its pages would have to be found again, one by one.
        """
        self._segment = None
        self._cloned = False

    def drop(self) -> None:
        """Forget all: the round is to begin anew, or there will be none. Idempotent."""
        self.end()
        self._mapped = None

    def _receive(self, call: Mapping[str, Any], load: Callable[[list[tuple[str, torch.Tensor]]], object]) -> int:
        places = _places(call.get("metadata"))
        if not places:
            raise BucketError("metadata: an empty bucket is for `finished` alone")
        unit = call.get("layout")
        if unit not in ("elements", "bytes"):
            raise BucketError(f"layout: expected 'elements' or 'bytes', not {unit!r}")
        segment, clone = self._buffer_of(call), bool(call.get("require_clone", True))
        written = call.get("written")
        if segment.event and written != segment.written:
            raise BucketError(f"the buffer is at {segment.written}, the call is about {written}: it was overwritten")
        views = [(place.name, segment.tensor(place, unit)) for place in places]  # all of them, before any is loaded
        load(views)
        if segment.event:
            if written != segment.written:
                raise BucketError(f"the buffer went from {written} to {segment.written} while it was read")
            segment.mark_read()
        self._segment, self._cloned = segment, clone
        return len(views)

    def _buffer_of(self, call: Mapping[str, Any]) -> _Segment:
        """The buffer of a call: the one it carries, or the one that is registered."""
        handle = call.get("buffer")
        if handle is not None:
            event = call.get("event")
            if event is None and not call.get("require_clone", True):
                raise BucketError("event: needed with a buffer that is to be kept (require_clone false)")
            segment = _Segment(self._folder, handle, event, self._mapped)
            self._mapped = segment.mapping
            return segment
        if self._segment is None:
            raise BucketError("buffer: none is registered here; send it with the first call of a round")
        if self._cloned:
            raise BucketError("buffer: what is registered here was a clone, which sees no later write; send it again")
        return self._segment


class _Mapping(NamedTuple):
    """A segment in this process's memory: which file it is, and how long."""

    inode: int
    size: int
    memory: mmap.mmap


class _Segment:
    """A segment that is mapped here.

    Attributes:
        event: whether its sequence lock is to be looked at.
        mapping: how it is mapped: as before, where it was.
    """

    def __init__(self, folder: Path, handle: Any, event: Any, before: _Mapping | None = None) -> None:
        try:
            name, size, dtype = handle["name"], handle["bytes"], handle["dtype"]
        except (KeyError, TypeError) as error:
            raise BucketError(f"buffer: expected name, bytes and dtype: {error!r}") from error
        if not isinstance(name, str) or not name.startswith(PREFIX) or "/" in name:
            raise BucketError(f"buffer: {name!r:.100} is no segment of a weight update")
        if type(size) is not int or size < 0:
            raise BucketError(f"buffer: bytes: expected a whole number from 0, not {size!r}")
        self.dtype = _dtype(dtype)
        self.event = event is not None
        if self.event and event != {"kind": "sequence", "name": name}:
            raise EventError(f"event: only a sequence lock of the same segment can be opened here, not {event!r:.200}")
        try:
            with (folder / name).open("r+b") as file:  # also where it is mapped: it has to be there still
                inode = os.fstat(file.fileno()).st_ino
                if before is None or before[:2] != (inode, size):
                    before = _Mapping(inode, size, mmap.mmap(file.fileno(), HEAD_BYTES + size))
        except (OSError, ValueError) as error:
            raise BucketError(f"buffer: {name} cannot be mapped: {error}") from error
        self.mapping = before
        self._map = before.memory
        self._counters = np.frombuffer(self._map, dtype="<u8", count=2)
        self._size = size

    @property
    def written(self) -> int:
        return int(self._counters[0])

    def mark_read(self) -> None:
        self._counters[1] = self._counters[0]

    def tensor(self, place: Place, unit: str) -> torch.Tensor:
        """A view of one tensor.

        Raises:
            BucketError: it is not in the buffer, or not of its dtype.
        """
        item = place.dtype.itemsize
        if unit == "elements" and place.dtype is not self.dtype:
            raise BucketError(f"{place.name}: it is {place.dtype}, the buffer was registered as {self.dtype}")
        if unit == "bytes" and self.dtype is not torch.uint8:
            raise BucketError(f"{place.name}: byte indices need a buffer of uint8, not {self.dtype}")
        scale = item if unit == "elements" else 1
        start, end, count = place.start * scale, place.end * scale, math.prod(place.shape)
        if end - start != count * item or start % item:
            raise BucketError(
                f"{place.name}: {count} elements of {place.dtype} do not lie at {place.start}..{place.end}"
            )
        if end > self._size:
            raise BucketError(f"{place.name}: it ends at byte {end}, the buffer has {self._size}")
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=HEAD_BYTES + start).view(place.shape)


def _places(metadata: Any) -> list[Place]:
    if not isinstance(metadata, list):
        raise BucketError(f"metadata: expected a list, not {type(metadata).__name__}")
    places = [_place(record) for record in metadata]
    if (clash := clash_of((place.name, place.start, place.end) for place in places)) is not None:
        raise BucketError(f"metadata: {clash}")
    return places


def _place(record: Any) -> Place:
    try:
        name, shape, dtype, numel = record["name"], tuple(record["shape"]), record["dtype"], record["numel"]
        place = Place(name, shape, _dtype(dtype), record["start"], record["end"])
    except (KeyError, TypeError) as error:
        raise BucketError(f"metadata: no record of a tensor: {error!r}") from error
    numbers: Iterable[Any] = (*shape, place.start, place.end, numel)
    if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in numbers) or math.prod(shape) != numel:
        raise BucketError(f"metadata: {name!r:.100}: {record!r:.300} contradicts itself")
    return place


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise BucketError(f"dtype: torch has none called {name!r:.100}")
    return dtype
