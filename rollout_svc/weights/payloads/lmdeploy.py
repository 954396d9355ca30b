"""What LMDeploy's `POST /update_weights` is sent: buckets of one dtype, through a buffer that it may keep for a round.

Its consumer loads stale bytes without a word in cases that `weights/persistent.py` lists, and never says whether it
opens events. So:

- A buffer is left out only where the caller vouches that the engine opens events (`event`); it is off by default, and
  every call then carries the buffer, to be cloned, after the writes are done.
- The next bucket is not written before the last was answered: the calls alternate with `answered` or `failed`.
- An empty bucket is sent only to say `finished`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from rollout_svc.engines.calls import Call
from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads.metadata import LMDeployMetadata, metadata_of
from rollout_svc.weights.payloads.pickling import dumps, handle_of
from rollout_svc.weights.persistent import Parts, SendRound

if TYPE_CHECKING:
    import torch

__all__ = ["Event", "LMDeployRound", "payload", "update_call"]


class Event(Protocol):
    """Orders writing here and reading there: `torch.cuda.Event(interprocess=True)`."""

    def ipc_handle(self) -> bytes:
        """What another process opens it by."""

    def record(self) -> None:
        """Mark the work that was queued so far."""

    def wait(self) -> None:
        """Queue nothing before what was marked is done, here or there."""


def payload(bucket: FlattenedBucket | None, parts: Parts, event: Event | None = None) -> str:
    """Serialise one call for one rank; None: nothing follows.

    Raises:
        ValueError: the bucket is not laid out in elements, or its event is missing.
    """
    if bucket is None:
        return dumps({"metadata": []}, {})
    body: dict[str, Any] = {
        "metadata": metadata_of(bucket, LMDeployMetadata),
        "require_clone": parts.require_clone,
    }
    if parts.buffer:
        body["flattened_tensor"] = handle_of(bucket.buffer)
    if parts.event:
        if event is None:
            raise ValueError("expected the event that orders writing and reading of a buffer that is not cloned")
        body["event_ipc_handle"] = event.ipc_handle()
    return dumps(body, LMDeployMetadata.names())


def update_call(payloads: Sequence[str], *, finished: bool) -> Call:
    """Build the call: a string for one rank, a list by rank for more.

    Raises:
        ValueError: there is no rank.
    """
    if not payloads:
        raise ValueError("expected a payload for each tensor-parallel rank, at least one")
    body = {
        "serialized_named_tensors": payloads[0] if len(payloads) == 1 else list(payloads),
        "load_format": "flattened_bucket",
        "finished": finished,
    }
    return Call("POST", "/update_weights", orjson.dumps(body), admin=True)


class LMDeployRound:
    """Makes the calls of updates to one engine, one after the other; see the module's invariants."""

    def __init__(self, *, ranks: int = 1, event: Event | None = None) -> None:
        """Start with no buffer.

        Args:
            ranks: tensor-parallel ranks of the engine; each gets a pickle of its own.
            event: orders writing and reading; given, the caller vouches that the engine opens events of other
                processes (`torch.cuda.Event.from_ipc_handle` on its platform). None: every call carries the buffer.
        """
        self._ranks = ranks
        self._event = event
        self._send = SendRound(events=event is not None)
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        self._generation = 0
        self._open: tuple[int, str] | None = None
        self._last = False

    def bucket(self, tensors: Sequence[tuple[str, torch.Tensor]], *, finished: bool = False) -> Call:
        """Write tensors of one dtype into the buffer, and build the call that has them loaded.

        Raises:
            ValueError: they cannot share a bucket.
            RuntimeError: the last call was not answered: its buffer may still be read.
        """
        self._refuse_open()
        if self._event is not None:
            self._event.wait()
        bucket, generation = self._pack(tensors)
        dtype = str(bucket.buffer.dtype)
        parts = self._send.next(generation, dtype)
        if self._event is not None:
            self._event.record()
        if parts.synchronize:
            _synchronize(bucket.buffer)
        self._open, self._last = (generation, dtype), finished
        return update_call([payload(bucket, parts, self._event) for _ in range(self._ranks)], finished=finished)

    def finish(self) -> Call:
        """Build the call that says that nothing follows."""
        self._refuse_open()
        self._last = True
        nothing = Parts(buffer=False, event=False, require_clone=True, synchronize=False)
        return update_call([payload(None, nothing) for _ in range(self._ranks)], finished=True)

    def answered(self) -> None:
        """The last call was answered 200: the engine has loaded it."""
        if self._open is not None:
            self._send.sent(*self._open)
        if self._last:
            self._send.ended()
        self._open, self._last = None, False

    def failed(self) -> None:
        """The last call was answered by anything else, or not at all; or the engine slept: begin the round anew."""
        self._send.failed()
        self._open, self._last = None, False

    def _refuse_open(self) -> None:
        if self._open is not None or self._last:
            raise RuntimeError("the last call was not answered yet: its buffer may still be read")

    def _pack(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[FlattenedBucket, int]:
        """Write into this dtype's buffer, or a new one where it is too small."""
        import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

        first = tensors[0][1] if tensors else None
        held = self._buffers.get(first.dtype) if first is not None else None
        size = sum(tensor.numel() for _, tensor in tensors)
        if first is not None and (held is None or held[0].numel() < size or held[0].device != first.device):
            if held is not None:
                _synchronize(held[0])  # the engine's reads of it are ordered behind the event, not behind its release
            self._generation += 1
            held = torch.empty(size, dtype=first.dtype, device=first.device), self._generation
        bucket = FlattenedBucket.pack(tensors, "elements", into=None if held is None else held[0])
        assert held is not None  # noqa: S101 - an empty bucket was refused by `pack`
        self._buffers[bucket.buffer.dtype] = held
        return bucket, held[1]


def _synchronize(buffer: torch.Tensor) -> None:
    import torch  # noqa: PLC0415

    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
