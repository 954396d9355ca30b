"""What LMDeploy's `POST /update_weights` is sent: buckets of one dtype, through a buffer that it may keep for a round.

Its consumer loads stale bytes without a word in cases that `weights/persistent.py` lists, and never says whether it
opens events. So:

- A buffer is left out only where the caller vouches that the one receiver opens events (`event`); it is off by default,
  and every call then carries the buffer, to be cloned, after the writes are done.
- A bucket that was refused under an event may be sent once more without, and so is every other from then on: the round
  begins anew with it.
- The next bucket is not written before the last was answered: the calls alternate with `answered` or `ended`.
- An empty bucket is sent only to say `finished`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads.metadata import LMDeployMetadata, metadata_of
from rollout_svc.weights.payloads.pickling import dumps, handle_of
from rollout_svc.weights.persistent import Parts, SendRound

if TYPE_CHECKING:
    import torch

__all__ = ["Event", "LMDeployRound", "body", "finish", "payload", "synchronize"]


class Event(Protocol):
    """Orders writing here and reading there: `torch.cuda.Event(interprocess=True)`."""

    def ipc_handle(self) -> bytes:
        """What another process opens it by."""

    def record(self) -> None:
        """Mark the work that was queued so far."""

    def wait(self) -> None:
        """Queue nothing before what was marked is done, here or there."""


def payload(bucket: FlattenedBucket, parts: Parts, event: Event | None = None) -> str:
    """Serialise one call for one rank.

    Raises:
        ValueError: the bucket is not laid out in elements, or its event is missing.
    """
    carried: dict[str, Any] = {
        "metadata": metadata_of(bucket, LMDeployMetadata),
        "require_clone": parts.require_clone,
    }
    if parts.buffer:
        carried["flattened_tensor"] = handle_of(bucket.buffer)
    if parts.event:
        if event is None:
            raise ValueError("expected the event that orders writing and reading of a buffer that is not cloned")
        carried["event_ipc_handle"] = event.ipc_handle()
    return dumps(carried, LMDeployMetadata.names())


def body(payloads: Sequence[str], *, finished: bool = False) -> dict[str, Any]:
    """Make the body of the call: a string for one rank, a list by rank for more.

    Raises:
        ValueError: there is no rank.
    """
    if not payloads:
        raise ValueError("expected a payload for each tensor-parallel rank, at least one")
    return {
        "serialized_named_tensors": payloads[0] if len(payloads) == 1 else list(payloads),
        "load_format": "flattened_bucket",
        "finished": finished,
    }


def finish(ranks: int) -> dict[str, Any]:
    """Make the body of the call that says that nothing follows."""
    return body([dumps({"metadata": []}, {}) for _ in range(ranks)], finished=True)


class LMDeployRound:
    """Has buckets ready for receivers that go at one pace, in one round after the other; see the module's invariants.

    Attributes:
        allocated: bytes of buffers that were ever made.
    """

    def __init__(self, *, receivers: int = 1, event: Event | None = None) -> None:
        """Start with no buffer.

        Args:
            receivers: ranks of engines, each of which gets a pickle of its own.
            event: orders writing here and reading by one receiver; given, the caller vouches that this one opens
                events of other processes (`torch.cuda.Event.from_ipc_handle` on its device). None: every call carries
                the buffer.

        Raises:
            ValueError: an event for several: it knows only the last reading of them all.
        """
        if event is not None and receivers != 1:
            raise ValueError(f"expected one receiver of an event, not {receivers}")
        self.allocated = 0
        self._receivers = receivers
        self._event = event
        self._send = SendRound(events=event is not None)
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        self._generation = 0
        self._open: tuple[int, str] | None = None
        self._last: FlattenedBucket | None = None  # while it is open

    def bucket(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
        """Write tensors of one dtype into the buffer; what each receiver is to be sent.

        Raises:
            ValueError: they cannot share a bucket.
            RuntimeError: the last one was not answered: its buffer may still be read.
        """
        if self._open is not None:
            raise RuntimeError("the last bucket was not answered yet: its buffer may still be read")
        if self._event is not None:
            self._event.wait()
        bucket, generation = self._pack(tensors)
        dtype = str(bucket.buffer.dtype)
        parts = self._send.next(generation, dtype)
        if self._event is not None:
            self._event.record()
        if parts.synchronize:
            synchronize(bucket.buffer)
        self._open, self._last = (generation, dtype), bucket
        return [payload(bucket, parts, self._event) for _ in range(self._receivers)]

    def without_event(self) -> list[str]:
        """What each receiver is to be sent of the last bucket in place of what it refused.

        Raises:
            ValueError: there is none that is not answered, or it came without an event.
        """
        if self._open is None or self._last is None or self._event is None:
            raise ValueError("there is no bucket with an event that could come without")
        self._event = None
        self._send.no_events()
        parts = self._send.next(*self._open)
        synchronize(self._last.buffer)
        return [payload(self._last, parts) for _ in range(self._receivers)]

    def answered(self) -> None:
        """Every receiver has loaded the last bucket."""
        if self._open is not None:
            self._send.sent(*self._open)
        self._open = self._last = None

    def ended(self) -> None:
        """The round is over, however it ended, or a receiver slept: the next call begins one anew."""
        self._send.ended()
        self._open = self._last = None

    def _pack(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[FlattenedBucket, int]:
        """Write into this dtype's buffer, or a new one where it is too small."""
        import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

        first = tensors[0][1] if tensors else None
        held = self._buffers.get(first.dtype) if first is not None else None
        size = sum(tensor.numel() for _, tensor in tensors)
        if first is not None and (held is None or held[0].numel() < size or held[0].device != first.device):
            if held is not None:
                synchronize(held[0])  # the engine's reads of it are ordered behind the event, not behind its release
            self._generation += 1
            held = torch.empty(size, dtype=first.dtype, device=first.device), self._generation
            self.allocated += held[0].nbytes
        bucket = FlattenedBucket.pack(tensors, "elements", into=None if held is None else held[0])
        assert held is not None  # noqa: S101 - an empty bucket was refused by `pack`
        self._buffers[bucket.buffer.dtype] = held
        return bucket, held[1]


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until what was queued on its device is done."""
    import torch  # noqa: PLC0415

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
