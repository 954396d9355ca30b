"""Weights through a buffer of shared memory, which every engine on this machine reads where it lies.

Invariants:

- The buffer is kept from one update to the next: the second of the same sizes allocates nothing.
- It travels with the first bucket of an update, and when it was replaced; the others carry metadata alone. One whose
  name somebody took away is replaced before it travels: no engine could map it.
- Once an engine could not open the event of a buffer none is sent any more: every call carries the buffer, to be
  copied, and the bucket is written by then. That is said once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog

from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.persistent import SendRound
from rollout_svc.weights.senders.protocol import Bodies, Engine, Named
from rollout_svc.weights.slab import SharedSlab

__all__ = ["SharedMemorySender"]

_DTYPE: Final = "uint8"
_ALIGNMENT: Final = 16
_log = structlog.get_logger("weights")


class SharedMemorySender:
    """Writes into shared memory; see the module's invariants.

    Attributes:
        cloned: why engines are sent the buffer with every call, to be copied; None: they are not.
    """

    way: Way = "shm"
    one_dtype = False

    def __init__(self, bucket_bytes: int) -> None:
        """Make a sender; nothing is reserved before the first bucket.

        Args:
            bucket_bytes: of the buffer, unless a tensor is larger.
        """
        self.allocated = 0
        self.cloned: str | None = None
        self._bucket_bytes = bucket_bytes
        self._slab: SharedSlab | None = None
        self._generation = 0
        self._round = SendRound(events=True)
        self._engines: tuple[Engine, ...] = ()
        self._written: int | None = None  # generation of the buffer of the bucket that was given out
        self._bucket: FlattenedBucket | None = None  # that one

    def open(self, engines: Sequence[Engine]) -> Bodies:
        """Begin a round: engines may have come since the last one."""
        if self._slab is not None and self._slab.lost:
            self.release()
        self._engines, self._written = tuple(engines), None
        self._round = SendRound(events=self.cloned is None)
        return {}

    def write(self, tensors: Sequence[Named]) -> Bodies:
        """Write a bucket into the buffer; what each engine is told is the same.

        Raises:
            OSError: there is no room.
        """
        import torch  # noqa: PLC0415 - the trainer has it

        if self._written is not None:
            self._round.sent(self._written, _DTYPE)
        size = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in tensors)
        slab = self._room(size)
        with slab.writing():
            self._bucket = FlattenedBucket.pack(tensors, "bytes", into=slab.tensor(torch.uint8))
        self._written = self._generation
        return self._told(slab, self._bucket)

    def without_event(self, why: str) -> Bodies:
        """Tell of the bucket that was written last once more; it lies where it was written.

        Raises:
            ValueError: none was written, or none with an event.
        """
        if self._slab is None or self._bucket is None or self._written is None or not self._round.no_events():
            raise ValueError("there is no bucket with an event that could come without")
        if self.cloned is None:
            _log.warning("weights.cloned", why=why)
        self.cloned = why
        return self._told(self._slab, self._bucket)

    def _told(self, slab: SharedSlab, bucket: FlattenedBucket) -> Bodies:
        parts = self._round.next(self._generation, _DTYPE)
        body: dict[str, Any] = {
            "metadata": [meta.as_json() for meta in bucket.metadata],
            "layout": "bytes",
            "written": slab.written,
            "require_clone": parts.require_clone,
        }
        if parts.buffer:
            body["buffer"] = {**slab.handle, "dtype": _DTYPE}
        if parts.event:
            body["event"] = {"kind": "sequence", "name": slab.name}
        return {engine.engine_id: body for engine in self._engines}

    def close(self, *, whole: bool) -> None:  # noqa: ARG002 - the next round begins anew in any case
        """Nothing is to be told to anybody."""
        self._engines, self._written, self._bucket = (), None, None

    def break_off(self) -> None:
        """Nothing here waits for anybody."""

    def release(self) -> None:
        """Give up the buffer."""
        self._bucket = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _room(self, nbytes: int) -> SharedSlab:
        """The buffer, large enough; another one has another generation."""
        if self._slab is None or self._slab.nbytes < nbytes:
            self.release()
            self._slab = SharedSlab(max(nbytes, self._bucket_bytes))
            self._generation += 1
            self.allocated += self._slab.nbytes
        return self._slab
