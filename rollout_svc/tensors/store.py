"""Where heavy tensors lie: the port, and the store in this process.

Invariants:

- A tensor that is stored cannot be written to through what the store gives out, nor be made writable by who has it.
- Freeing ends the store's own hold on the bytes; a view that somebody still has keeps them until it goes.
- `put` may block, on memory or on another process: it is called off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from rollout_svc.tensors.sealing import sealed

__all__ = ["InMemory", "MemoryStore", "Store", "StoreName", "Stored", "make_store", "put_somewhere"]

StoreName = Literal["memory", "shared", "ray"]


class Stored(Protocol):
    """A tensor where it lies; whoever has it frees it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, known without looking at it."""

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor, read-only, without a copy where the store allows that. May block."""

    def later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """What reads the tensor as `view` does, in any thread, and keeps its bytes until it goes. Blocks nowhere."""

    def free(self) -> None:
        """Let go of the bytes."""


class Store(Protocol):
    """Puts tensors somewhere."""

    name: str

    def put(self, tensor: np.ndarray[Any, Any]) -> Stored:
        """Store a tensor; the caller writes to it no more. What it raises means that there is no room."""

    def close(self) -> None:
        """Give up what the store itself holds; idempotent. What was put is its owners' to free."""


class InMemory:
    """A tensor in this process."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: np.ndarray[Any, Any]) -> None:
        tensor.setflags(write=False)
        self._tensor: np.ndarray[Any, Any] | None = sealed(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 once it was freed."""
        return 0 if self._tensor is None else self._tensor.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; the tensor has to be there."""
        return tuple(self.view().shape)

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor itself, which cannot be written to."""
        if self._tensor is None:
            raise ValueError("the tensor was freed")
        return self._tensor

    def later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """The tensor, when it is called."""
        tensor = self.view()
        return lambda: tensor

    def free(self) -> None:
        """Forget it; idempotent."""
        self._tensor = None


class MemoryStore:
    """Keeps tensors in this process."""

    name = "memory"

    def put(self, tensor: np.ndarray[Any, Any]) -> InMemory:
        """Keep it as it is; nothing is copied."""
        return InMemory(tensor)

    def close(self) -> None:
        """Nothing is held here."""


def make_store(name: StoreName, ray_address: str = "auto") -> Store:
    """Make a store; may take seconds, and is called off the event loop.

    Raises:
        OSError: it is not to be had here: no shared memory, no Ray cluster (ConnectionError).
    """
    if name == "shared":
        from rollout_svc.tensors.shared import SharedStore  # noqa: PLC0415 - only where it is asked for

        return SharedStore()
    if name == "ray":
        from rollout_svc.tensors.ray_store import RayStore  # noqa: PLC0415

        return RayStore(ray_address)
    return MemoryStore()


def put_somewhere(store: Store, tensor: np.ndarray[Any, Any]) -> tuple[Stored, bool]:
    """Put a tensor into a store, or where that has no room keep it in this process; returns whether the store has it.

    Whatever a store raises, it means that it has no room: that is this service's trouble, and no sample's.
    """
    try:
        return store.put(tensor), True
    except Exception:  # noqa: BLE001 - see above
        return MemoryStore().put(tensor), False
