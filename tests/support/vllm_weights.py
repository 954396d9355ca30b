"""One worker of vLLM as it takes weights by a handle of each tensor.

It keeps what it opened, as the real one does of a layer until all of it has come: memory that is written to again
after the answer shows in what it has.
"""

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
    """

    def __init__(self, uuid: str) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._uuid = uuid

    def update(self, info: Mapping[str, Any]) -> None:
        """Take one call.

        Raises:
            Exception: whatever goes wrong: the server answers 500.
        """
        if not len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"]):
            raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")
        handles = loads(info["ipc_handles_pickled"], ("", ""))
        for name, handle in zip(info["names"], handles, strict=True):
            self.weights[name] = _open(handle[self._uuid])


def _open(arguments: Any) -> torch.Tensor:
    rebuild: Any = rebuild_tensor if len(arguments) == _ON_THE_CPU else rebuild_cuda_tensor
    opened: torch.Tensor = rebuild(*arguments)
    return opened
