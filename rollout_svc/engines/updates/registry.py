"""Which kind of engine takes weights by which way.

| way | sglang | vllm | lmdeploy |
|---|---|---|---|
| `shm` | the built-in engine alone | | |
| `cuda_ipc` | yes, not the built-in one | where its weight transfer is `ipc` | PyTorch backend |
| `distributed` | yes | started with `--weight-transfer-config` `nccl` | since 0.14, PyTorch |

Invariant: what an engine was started for is in its capabilities; here is what its kind can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollout_svc.engines.updates.distributed import (
    LMDeployDistributedUpdate,
    SGLangDistributedUpdate,
    VLLMDistributedUpdate,
)
from rollout_svc.engines.updates.lmdeploy import LMDeployUpdate
from rollout_svc.engines.updates.protocol import EngineUpdate
from rollout_svc.engines.updates.sglang import SGLangUpdate
from rollout_svc.engines.updates.shared_memory import SharedMemoryUpdate
from rollout_svc.engines.updates.vllm import VLLMUpdate

__all__ = ["make_update"]

_UPDATES: Final[dict[tuple[str, str], Callable[[], EngineUpdate]]] = {
    ("sglang", "shm"): SharedMemoryUpdate,
    ("sglang", "cuda_ipc"): SGLangUpdate,
    ("vllm", "cuda_ipc"): VLLMUpdate,
    ("lmdeploy", "cuda_ipc"): LMDeployUpdate,
    ("sglang", "distributed"): SGLangDistributedUpdate,
    ("vllm", "distributed"): VLLMDistributedUpdate,
    ("lmdeploy", "distributed"): LMDeployDistributedUpdate,
}


def make_update(dialect: str, way: str) -> EngineUpdate | None:
    """Make one engine's side of one update; None where there is no such thing."""
    make = _UPDATES.get((dialect, way))
    return None if make is None else make()
