"""A weight transfer of the tests' own, inside vLLM's worker: its real rounds, without a GPU.

vLLM's `ipc` and `nccl` need CUDA; what all of them do between `start_weight_update` and `finish_weight_update` is done
here by the same calls. The bytes come from a checkpoint: a bucket is every `parts`-th of its tensors, so that a fused
layer of the engine gets its own from several.

Imported by the engine alone (`--worker-extension-cls`), with its own interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

__all__ = ["Extension", "Files"]


@dataclass
class Opening:
    """What `/init_weight_transfer_engine` is given: nothing."""


@dataclass
class Bucket:
    """What `/update_weights` is given.

    Attributes:
        path: of the checkpoint.
        part: which of the parts, from 0.
        parts: how many there are.
    """

    path: str
    part: int = 0
    parts: int = 1


class Files(WeightTransferEngine):  # type: ignore[misc]
    """Loads buckets from a checkpoint."""

    init_info_cls = Opening
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Opening) -> None:
        """There is nobody to meet."""

    def start_weight_update(self) -> None:
        """As vLLM's own backends do: from here on there are no weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As its base does, less the wait for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket."""
        tensors = load_file(Path(update_info.path) / "model.safetensors")
        names = sorted(tensors)[update_info.part :: update_info.parts]
        self.model.load_weights([(name, tensors[name]) for name in names])

    def finish_weight_update(self) -> None:
        """As vLLM's own backends do: what did not come is again what it was."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


class Extension:
    """Adds nothing to the worker: that its module was imported is enough."""


WeightTransferEngineFactory.register_engine("files", Files)
