"""What is told of routed experts: recorded row by row as tokens are computed, one array for each request.

Row t of a request is the routing of the forward pass of its token t; its last token has none yet.

Invariants:
- A row stays as it was when its token was first computed: logprobs made under it are replayed with it, though the
  token may be computed anew, under other weights, after a retraction.
- What is recorded is bounded by the rows of the batch and the context; a request takes a copy when it leaves.
- Dense layers hold `DENSE`, which is no expert of any model.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_svc.embedded.job import Job
    from rollout_svc.embedded.model import TinyConfig

DENSE: Final = 2**31 - 1
"""In place of experts in a layer that has none: who uses it by mistake finds out, as nobody does of a zero."""


class RoutingTable:
    """The routing of every row of a batch, int32[rows, length, layers, top_k]; empty for a model without experts."""

    __slots__ = ("_layers", "_row_index", "_table")

    def __init__(self, config: TinyConfig, rows: int, length: int) -> None:
        layers = config.layers if config.moe_layers else 0
        self._layers = torch.tensor(config.moe_layers, dtype=torch.int64)
        self._row_index = torch.arange(rows)[:, None]
        self._table = torch.full((rows, length, layers, config.top_k), DENSE, dtype=torch.int32)

    def prefilled(self, jobs: list[Job], first_row: int, routing: list[Tensor]) -> None:
        """Record what `CachedForward.prefill` returned for some jobs; rows that a job brings along are kept."""
        for layer, chosen in zip(self._layers.tolist(), routing, strict=True):
            count, length, _ = chosen.shape
            self._table[first_row : first_row + count, :length, layer] = chosen.int()
        for row, job in enumerate(jobs, start=first_row):
            if job.routing is not None:
                self._table[row, : len(job.routing)] = job.routing

    def decoded(self, positions: Tensor, routing: list[Tensor]) -> None:
        """Record what `CachedForward.decode` returned, for the tokens at int64[R] `positions` of the first R rows."""
        if routing:
            rows = self._row_index[: len(positions)]
            self._table[rows, positions[:, None], self._layers] = torch.stack(routing, dim=1).int()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of one row over another's."""
        self._table[target, :length] = self._table[source, :length]

    def leave(self, job: Job, row: int) -> None:
        """Give a job that asked for it the routing of all its tokens but the last; a model without experts has none."""
        if job.wants_routing and len(self._layers):
            job.routing = self._table[row, : job.length - 1].clone()


def encode(routing: Tensor, start: int) -> str:
    """Return base64 of the raw little-endian int32 of int32[rows, layers, top_k], from row `start` on."""
    return base64.b64encode(routing[start:].numpy().astype("<i4", copy=False).tobytes()).decode()
