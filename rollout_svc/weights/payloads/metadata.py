"""Where the tensors of a bucket lie, as LMDeploy and SGLang write it: six fields under each one's own class name.

| | unit of the indices | `numel` |
|---|---|---|
| `lmdeploy.utils` | elements | elements |
| `sglang.srt.weight_sync.tensor_bucket` | bytes | bytes |

Invariant: an index that is sent means to the receiver what it means in the bucket: the layout is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_svc.weights.bucket import FlattenedBucket, Layout
from rollout_svc.weights.payloads.pickling import Named

if TYPE_CHECKING:
    import torch

__all__ = ["LMDeployMetadata", "Metadata", "SGLangMetadata", "metadata_of"]


class Metadata:
    """Stands in for a receiver's `FlattenedTensorMetadata`: pickled, it is its name and these fields."""

    layout: Layout
    module: str

    def __init__(
        self, name: str, shape: torch.Size, dtype: torch.dtype, start_idx: int, end_idx: int, numel: int
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.start_idx = start_idx
        self.end_idx = end_idx
        self.numel = numel

    @classmethod
    def names(cls) -> Named:
        """What it is written as."""
        return {cls: (cls.module, "FlattenedTensorMetadata")}


class LMDeployMetadata(Metadata):
    """LMDeploy's."""

    layout: Layout = "elements"
    module = "lmdeploy.utils"


class SGLangMetadata(Metadata):
    """SGLang's."""

    layout: Layout = "bytes"
    module = "sglang.srt.weight_sync.tensor_bucket"


def metadata_of(bucket: FlattenedBucket, kind: type[Metadata]) -> Sequence[Metadata]:
    """Say in a receiver's words where the tensors of a bucket lie.

    Raises:
        ValueError: the bucket is laid out in the other unit.
    """
    import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it

    if bucket.layout != kind.layout:
        raise ValueError(f"{kind.module} wants indices in {kind.layout}, the bucket has them in {bucket.layout}")
    return [
        kind(
            meta.name,
            torch.Size(meta.shape),
            getattr(torch, meta.dtype),
            meta.start,
            meta.end,
            meta.numel if kind.layout == "elements" else meta.end - meta.start,
        )
        for meta in bucket.metadata
    ]
