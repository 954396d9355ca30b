"""Tensors in Ray's object store.

Ray 2.60 frees an object when its last reference goes, and in no other way; a reference that was pickled out of band
keeps it for good (https://docs.ray.io/en/latest/ray-core/objects/serialization.html). So the reference stays in here.

Invariants:

- The bare reference is in one place, and cannot be pickled with it.
- Freeing drops it: the object is gone then, or when the last array that was read from it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from ray import ObjectRef

__all__ = ["InRay", "RayStore"]


class InRay:
    """A tensor in Ray's object store."""

    __slots__ = ("_nbytes", "_reference", "shape")

    def __init__(self, reference: ObjectRef[Any], nbytes: int, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._reference: ObjectRef[Any] | None = reference
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 once it was freed."""
        return 0 if self._reference is None else self._nbytes

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor where it lies in this node's store; it cannot be written to. Blocks while it comes from another.

        Raises:
            ValueError: it was freed.
            ray.exceptions.RayError: the object was lost, with the node that had it.
        """
        import ray  # noqa: PLC0415 - takes a second to import: only for who uses it

        if self._reference is None:
            raise ValueError("the tensor was freed")
        tensor: np.ndarray[Any, Any] = ray.get(self._reference)
        tensor.setflags(write=False)
        return tensor

    def free(self) -> None:
        """Drop the reference; idempotent."""
        self._reference = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a tensor in Ray's store cannot be pickled: a reference out of band pins its object for good")


class RayStore:
    """Keeps tensors in the object store of a Ray cluster."""

    name = "ray"

    def __init__(self, address: str = "auto") -> None:
        """Connect to a cluster, unless this process is connected already; takes seconds.

        Args:
            address: of the cluster; `auto` finds the one that runs on this machine.

        Raises:
            ConnectionError: there is none.
        """
        import ray  # noqa: PLC0415

        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, configure_logging=False)

    def put(self, tensor: np.ndarray[Any, Any]) -> InRay:
        """Copy a tensor there.

        Raises:
            ray.exceptions.RayError: the store is full, and could not spill.
        """
        import ray  # noqa: PLC0415

        return InRay(ray.put(tensor), tensor.nbytes, tensor.shape)

    def close(self) -> None:
        """Nothing is held here; the connection is the process's."""
