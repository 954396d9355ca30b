"""A mixture of experts: the router's choice, and the feed-forward of the chosen, alike for training and for the cache.

All experts lie side by side in one wide feed-forward, whose hidden channels are multiplied by the gate of their expert:
a gate of zero is an expert that was not taken. So a token's result does not depend on which experts the others of the
batch go through, and a few experts more cost less here than gathering the weights of the chosen would.

Source of the gates (softmax over the chosen alone): Jiang et al., Mixtral of Experts, 2024.

Invariants:
- Of experts with equal logits the one with the lower index is chosen.
- A routing that is given replaces the choice alone: the gates are the router's own at the experts named, and carry its
  gradient.
- A row of a routing with a negative number is free: the router chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Experts(nn.Module):
    """The feed-forward of one block: `top_k` of `count` experts, each as wide inside as the residual.

    Attributes:
        count: Experts.
        top_k: Experts a token goes through.
    """

    def __init__(self, width: int, count: int, top_k: int) -> None:
        super().__init__()
        self.count = count
        self.top_k = top_k
        self.router = nn.Linear(width, count, bias=False)
        self.expand = nn.Linear(width, count * width)
        self.contract = nn.Linear(count * width, width)
        # As if each expert had a matrix of its own: the default would take all for one sum, and start too small.
        nn.init.uniform_(self.contract.weight, -(width**-0.5), width**-0.5)

    def forward(self, normed: Tensor, routing: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the feed-forward.

        Args:
            normed: float[..., width].
            routing: int64[..., top_k], for each token distinct experts, or a negative number where the router is free;
                None: everywhere.

        Returns:
            float[..., width], and int64[..., top_k], the experts that were taken.
        """
        logits = self.router(normed)
        chosen = choose(logits, self.top_k)
        if routing is not None:
            chosen = torch.where((routing < 0).any(-1, keepdim=True), chosen, routing)
        chances = torch.softmax(logits.gather(-1, chosen), dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, chances)
        hidden = functional.gelu(self.expand(normed)).view(*gates.shape, -1) * gates[..., None]
        return self.contract(hidden.flatten(-2)), chosen


def choose(logits: Tensor, top_k: int) -> Tensor:
    """Return int64[..., top_k]: the indices of the largest of float[..., count], the largest first."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
