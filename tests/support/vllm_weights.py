"""One worker of vLLM as it takes weights by handles: of each tensor, or of one packed buffer that is split by sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from tests.support.engine_pickles import loads

__all__ = ["Worker"]

_ON_THE_CPU = 3
"""Arguments of what rebuilds a tensor there."""


class Worker:
    """One worker, on a device.

    Attributes:
        weights: what it has loaded.
        packed: whether each call is of one buffer.
        opened: how many buffers it has opened: one handle is opened once, as torch counts.
    """

    def __init__(self, uuid: str, *, packed: bool) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.opened = 0
        self._uuid = uuid
        self.packed = packed
        self._buffer: tuple[str, torch.Tensor] | None = None

    def update(self, info: Mapping[str, Any]) -> None:
        """Take one call.

        Raises:
            Exception: whatever goes wrong: the server answers 500.
        """
        if not len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"]):
            raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")
        handles = loads(info["ipc_handles_pickled"], ("", ""))
        tensors = self._split(info, handles) if self.packed else [_open(each[self._uuid]) for each in handles]
        for name, tensor in zip(info["names"], tensors, strict=True):
            self.weights[name] = tensor.clone()

    def _split(self, info: Mapping[str, Any], handles: Any) -> list[torch.Tensor]:
        pickled = info["ipc_handles_pickled"]
        if self._buffer is None or self._buffer[0] != pickled:
            self._buffer = pickled, _open(handles[self._uuid])
            self.opened += 1
        sizes = info["tensor_sizes"]
        parts = torch.split(self._buffer[1][: sum(sizes)], sizes)
        return [
            part.contiguous().view(getattr(torch, dtype)).view(*shape)  # fails for a scalar, as it does there
            for part, dtype, shape in zip(parts, info["dtype_names"], info["shapes"], strict=True)
        ]


def _open(arguments: Any) -> torch.Tensor:
    rebuild: Any = rebuild_tensor if len(arguments) == _ON_THE_CPU else rebuild_cuda_tensor
    opened: torch.Tensor = rebuild(*arguments)
    return opened
