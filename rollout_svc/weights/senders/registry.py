"""Which sender there is for each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollout_svc.engines.updates.protocol import Way
from rollout_svc.weights.senders.cuda_ipc import CudaIpcSender
from rollout_svc.weights.senders.distributed import DistributedSender
from rollout_svc.weights.senders.protocol import Sender
from rollout_svc.weights.senders.shared_memory import SharedMemorySender

__all__ = ["make_sender"]

_SENDERS: Final[dict[Way, Callable[[int], Sender]]] = {
    "shm": SharedMemorySender,
    "cuda_ipc": CudaIpcSender,
    "distributed": DistributedSender,
}


def make_sender(way: Way, bucket_bytes: int) -> Sender:
    """Make a sender; raises ValueError for a way that there is not."""
    make = _SENDERS.get(way)
    if make is None:
        raise ValueError(f"expected one of {', '.join(_SENDERS)}, not {way!r}")
    return make(bucket_bytes)
