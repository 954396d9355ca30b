"""One rank of SGLang as it takes weights: every call has its tensor, cut in bytes. What it loads are copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["load"]


def load(serialized: str, weights: dict[str, torch.Tensor]) -> None:
    """Load a bucket into a rank's weights.

    Raises:
        Exception: whatever goes wrong; what was loaded before it stays.
    """
    from tests.support.engine_pickles import SGLANG_CLASS, loads  # imports torch: only for who sends weights

    body = loads(serialized, SGLANG_CLASS)
    for meta in body["metadata"]:
        part = body["flattened_tensor"][meta.start_idx : meta.end_idx]
        weights[meta.name] = part.view(meta.dtype).reshape(meta.shape).clone()
