"""Routed experts that a fake can make and a test can check: a pure function of token, position and layer."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rollout_svc.tensors.experts import Layout

__all__ = ["TINY", "Routing"]

_GARBAGE: Final = 60000  # what dense layers hold where an engine never wrote to them

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of a model that was never trained.

    Attributes:
        num_experts: of a layer.
        top_k: of a token, distinct.
        layers: hidden layers.
        moe_layers: those that have experts.
    """

    num_experts: int
    top_k: int
    layers: int
    moe_layers: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """What the service may know of it."""
        return Layout(self.num_experts, self.top_k, self.layers, self.moe_layers)

    def rows(self, tokens: Sequence[int]) -> Array:
        """What a sample of these tokens, prompt included, has to end up with: `(T - 1, moe_layers, top_k)`, int64."""
        token = np.asarray(tokens[:-1], dtype=np.int64)[:, None, None]
        position = np.arange(len(token))[:, None, None]
        layer = np.asarray(self.moe_layers)[None, :, None]
        first = token * 31 + position * 7 + layer * 5
        rows: Array = (first + np.arange(self.top_k)) % self.num_experts
        return rows

    def hidden(self, tokens: Sequence[int], dense: int = _GARBAGE) -> Array:
        """The same with all hidden layers; the dense ones hold `dense`."""
        rows = self.rows(tokens)
        every = np.full((len(rows), self.layers, self.top_k), dense, dtype=np.int64)
        every[:, list(self.moe_layers)] = rows
        return every

    # -- as engines send them --------------------------------------------------------------------------------

    def int32(self, tokens: Sequence[int], start: int = 0) -> str:
        """Write them as SGLang does."""
        return base64.b64encode(self.hidden(tokens, 0)[start:].astype("<i4").tobytes()).decode()

    def npy(self, tokens: Sequence[int], start: int = 0) -> str:
        """Write them as vLLM does."""
        file = io.BytesIO()
        np.save(file, self.rows(tokens)[start:].astype(np.uint8 if self.num_experts <= 256 else np.uint16))
        return base64.b64encode(file.getvalue()).decode()

    def numbers(self, tokens: Sequence[int]) -> list[Any]:
        """Write them as LMDeploy does."""
        listed: list[Any] = self.hidden(tokens).tolist()
        return listed


TINY: Final = Routing(num_experts=8, top_k=2, layers=4, moe_layers=(1, 2, 3))
"""A model with one dense layer."""
