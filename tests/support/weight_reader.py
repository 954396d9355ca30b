"""Another process that reads weights as engines do: `python -m tests.support.weight_reader cpu|cuda`.

For each line `{"dialect", "body"}` it takes the call as an engine of one rank, and answers what it has then, in a line:
`{name: [dtype, shape, bytes in hex]}`.

- It opens events of the sender where there is CUDA.
- A device that is named by its UUID is looked up, as SGLang does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

from tests.support.lmdeploy_weights import Event, Rank
from tests.support.sglang_weights import load
from tests.support.vllm_weights import Worker

__all__ = ["as_json"]

DEVICE = 6
"""Which argument of `rebuild_cuda_tensor` is the device."""


def as_json(weights: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Weights as they are answered."""
    return {
        name: [str(tensor.dtype), list(tensor.shape), bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist()).hex()]
        for name, tensor in weights.items()
    }


def _opened(handle: bytes) -> Event:
    event: Event = torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), handle)  # type: ignore[no-untyped-call]
    return event


def _look_up_devices() -> str:
    """Have UUIDs of devices understood where a tensor is rebuilt; the UUID of the first."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    rebuild: Any = reductions.rebuild_cuda_tensor

    def found(*arguments: Any) -> Any:
        device = arguments[DEVICE]
        assert device in (0, uuid)
        return rebuild(*arguments[:DEVICE], 0, *arguments[DEVICE + 1 :])

    from tests.support import engine_pickles

    engine_pickles._ALLOWED["torch.multiprocessing.reductions", "rebuild_cuda_tensor"] = found
    return uuid


def main() -> None:
    """Read until there is no more."""
    on_cuda = sys.argv[1] == "cuda"
    uuid = _look_up_devices() if on_cuda else "cpu"
    rank, worker = Rank(_opened if on_cuda else None), Worker(uuid)
    weights: dict[str, dict[str, torch.Tensor]] = {"lmdeploy": rank.weights, "vllm": worker.weights, "sglang": {}}
    for line in sys.stdin:
        told = json.loads(line)
        body = told["body"]
        if told["dialect"] == "lmdeploy":
            rank.update(body["serialized_named_tensors"], finished=body["finished"])
        elif told["dialect"] == "vllm":
            worker.update(body)
        else:
            load(body["serialized_named_tensors"][0], weights["sglang"])
        sys.stdout.write(json.dumps(as_json(weights[told["dialect"]])) + "\n")
        sys.stdout.flush()
    os._exit(0)  # torch takes seconds to leave in peace


if __name__ == "__main__":
    main()
