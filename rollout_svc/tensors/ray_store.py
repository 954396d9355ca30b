"""Tensors in Ray's object store.

Ray 2.60 frees an object when its last reference goes, and in no other way; a reference that was pickled out of band
keeps it for good (https://docs.ray.io/en/latest/ray-core/objects/serialization.html). So the reference stays in here.

Invariants:

- A bare reference is in an `InRay` and nowhere else. It leaves the process inside what Ray itself serialises, and in no
  other way: Ray counts whoever has it then.
- Freeing drops it: the object is gone then, or when the last array that was read from it is, and what reads it later.
- What is copied into the store or looked at here is counted, in bytes, by the thread that did it: `touched`.
- Every read has a bound: Ray itself waits for ever for what no node sends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollout_svc.tensors.ray_connection import AUTO, JOIN_S, join

if TYPE_CHECKING:
    from ray import ObjectRef

__all__ = ["READ_S", "InRay", "RayStore", "in_band", "touched"]

READ_S: Final = 60.0
"""Seconds for a tensor to come from another node, where nobody says less: a GiB takes a few."""
_TOUCHED: Counter[str] = Counter()


def touched() -> dict[str, int]:
    """Bytes of tensors that were copied into the store or looked at in this process, by the name of the thread."""
    return dict(_TOUCHED)


def in_band() -> bool:
    """Whether it is Ray that serialises here, and counts the references in it; a pickle by hand would pin them."""
    from ray._private import worker  # noqa: PLC0415 - told nowhere else, and a second to import

    context: Any = worker.global_worker.get_serialization_context
    return bool(context().is_in_band_serialization())


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

    def view(self, timeout_s: float = READ_S) -> np.ndarray[Any, Any]:
        """The tensor where it lies in this node's store; it cannot be written to. Blocks while it comes from another.

        Args:
            timeout_s: seconds until it has to be here.

        Raises:
            ValueError: it was freed.
            TimeoutError: it did not come in time.
            ray.exceptions.RayError: the object was lost, with the node that had it.
        """
        import ray  # noqa: PLC0415 - takes a second to import: only for who uses it

        if self._reference is None:
            raise ValueError("the tensor was freed")
        try:
            tensor: np.ndarray[Any, Any] = ray.get(self._reference, timeout=max(0.0, timeout_s))
        except ray.exceptions.RayError as error:
            # Ray's own frame has the error in a variable: with it the reference, and all that the callers hold, would
            # stay until the collector comes by.
            error = error.with_traceback(None)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                told = f"a tensor of {self._nbytes} bytes, {self.shape}, did not come from Ray's store"
                raise TimeoutError(f"{told} within {timeout_s:.3g} s") from None
            raise error from None
        _TOUCHED[threading.current_thread().name] += tensor.nbytes
        tensor.setflags(write=False)
        return tensor

    def later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """What asks for the tensor when it is called; until it goes the object stays. Raises ValueError as `view`."""
        return self.lent().view

    def lent(self) -> InRay:
        """The same tensor with a reference of its own, for who reads it after this one was freed. Raises as `view`."""
        if self._reference is None:
            raise ValueError("the tensor was freed")
        return InRay(self._reference, self._nbytes, self.shape)

    def free(self) -> None:
        """Drop the reference; idempotent."""
        self._reference = None

    def __reduce__(self) -> tuple[Any, ...]:
        if not in_band():
            raise TypeError(
                "a tensor in Ray's store cannot be pickled: a reference out of band pins its object for good"
            )
        if self._reference is None:
            raise ValueError("the tensor was freed")
        return InRay, (self._reference, self._nbytes, self.shape)


class RayStore:
    """Keeps tensors in the object store of a Ray cluster."""

    name = "ray"

    def __init__(self, address: str = AUTO, *, timeout_s: float = JOIN_S) -> None:
        """Connect to a cluster, unless this process is connected already; takes seconds.

        Args:
            address: of the cluster; `auto` finds the one that runs on this machine.
            timeout_s: seconds until it has to be connected.

        Raises:
            ConnectionError: there is none, or it does not answer.
        """
        join(address, timeout_s)

    def put(self, tensor: np.ndarray[Any, Any]) -> InRay:
        """Copy a tensor there.

        Raises:
            ray.exceptions.RayError: the store is full, and could not spill.
        """
        import ray  # noqa: PLC0415

        _TOUCHED[threading.current_thread().name] += tensor.nbytes
        return InRay(ray.put(tensor), tensor.nbytes, tensor.shape)

    def close(self) -> None:
        """Nothing is held here; the connection is the process's."""
