"""What vLLM's `POST /update_weights` is told where its backend is `ipc`: names, dtypes, shapes, where the bytes lie.

Each tensor has a handle of its own. The packed form, one buffer that is split by sizes alone, is not made: it has no
room for padding, so that a tensor may lie where its items cannot be read, and the engine fails on a scalar in it, by
which time it has no weights.

Invariants:

- Nothing is sent that is known to fail there: once a round is open, an engine that fails has no weights.
- Memory of a tensor that was sent is not written to again: vLLM keeps what it has of a layer until all of it has come,
  and reads it then. Torch counts who has it, and gives it back later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout_svc.weights.payloads.pickling import dumps, handle_of

if TYPE_CHECKING:
    import torch

__all__ = ["describe", "ipc_info"]

Named = tuple[str, "torch.Tensor"]


def describe(tensors: Iterable[Named]) -> dict[str, Any]:
    """Name tensors in the order they will come."""
    listed = list(tensors)
    return {
        "names": [name for name, _ in listed],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in listed],
        "shapes": [list(tensor.shape) for _, tensor in listed],
    }


def ipc_info(tensors: Sequence[Named], uuids: Mapping[torch.device, str] | None = None) -> dict[str, Any]:
    """Describe tensors that are read where they lie, each by a handle of its own.

    The receiver looks a handle up by its own device.

    Args:
        tensors: on one device, contiguous.
        uuids: of the devices; None: asked of torch.

    Raises:
        ValueError: one is not contiguous: a handle would outlive the copy.
    """
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r}: expected a contiguous tensor, for it is read where it lies")
    handles = [{_uuid_of(tensor.device, uuids): handle_of(tensor)[1]} for _, tensor in tensors]
    return {**describe(tensors), "ipc_handles_pickled": dumps(handles, {})}


def _uuid_of(device: torch.device, uuids: Mapping[torch.device, str] | None) -> str:
    import torch  # noqa: PLC0415

    return uuids[device] if uuids is not None else str(torch.cuda.get_device_properties(device).uuid)
