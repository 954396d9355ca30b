"""Whether the bytes of a tensor of torch are where it says, all of them, in plain rows.

Trainers shard, offload and free: a tensor may have its shape and dtype still, and its data in other tensors, on no
device, or nowhere. Reading such bytes gives anything, or ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["lack_of"]


def lack_of(tensor: torch.Tensor) -> str | None:
    """Say why a tensor's bytes are not where it says, or not all that it is; None: they are."""
    import torch  # noqa: PLC0415 - whoever has a tensor has it
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: PLC0415

    # not in the condition: to mypy it would never be true
    elsewhere: bool = is_traceable_wrapper_subclass(tensor)
    if elsewhere or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(tensor).__name__}, whose data are elsewhere: gather it first"
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return f"it is {'nested' if tensor.is_nested else tensor.layout} on {tensor.device}"
    if tensor.is_quantized:
        return "it is quantized: its bytes are not all of it"
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (tensor.storage_offset() + reach + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "its memory was given back"
    return None
