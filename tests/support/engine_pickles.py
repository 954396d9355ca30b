"""How a faked engine reads the pickles it is sent: an exact list of names, as SGLang's own unpickler has one.

Stand-ins take the place of the engines' classes, which are not installed; tensors are rebuilt by torch's own functions,
where the sender wrote them: on the CPU, or on its device.
"""

from __future__ import annotations

import base64
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = ["LMDEPLOY_CLASS", "SGLANG_CLASS", "FlattenedTensorMetadata", "loads"]

Name = tuple[str, str]

LMDEPLOY_CLASS: Name = ("lmdeploy.utils", "FlattenedTensorMetadata")
SGLANG_CLASS: Name = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_REBUILDS = (
    *("rebuild_tensor", "rebuild_cuda_tensor"),
    *("rebuild_typed_storage", "rebuild_storage_filename", "rebuild_storage_empty"),
)
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_ALLOWED: dict[Name, Any] = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    **{("torch.multiprocessing.reductions", name): getattr(reductions, name) for name in _REBUILDS},
}


@dataclass
class FlattenedTensorMetadata:
    """What both engines call by this name: the same six fields, in units of their own."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, metadata: Name) -> None:
        super().__init__(io.BytesIO(data))
        self._metadata = metadata

    def find_class(self, module: str, name: str) -> Any:
        """Find what is on the list; anything else is refused."""
        if (module, name) == self._metadata:
            return FlattenedTensorMetadata
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"Blocked unsafe class loading ({module}.{name})")
        return _ALLOWED[module, name]


def loads(serialized: str, metadata: Name) -> Any:
    """Read base64 of a pickle whose metadata have that engine's class."""
    return _Unpickler(base64.b64decode(serialized, validate=True), metadata).load()
