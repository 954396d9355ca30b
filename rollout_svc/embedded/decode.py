"""The cached forward pass: prefill and one-token decode over a slotted key-value cache.

Invariants:
- Rows are slots of the cache. A row's logits equal those of `TinyTransformer.forward` on its tokens.
- With one torch thread a row's logits do not depend, to the last bit, on which other rows are computed with it: matrix
  products never have fewer than `MIN_ROWS` rows (below that the library takes another kernel, which sums in another
  order), lengths are rounded up to `LENGTH_STEP` (padding adds whole vectors of zeros), and a prompt is padded by its
  own length only. More threads split the sums by the size of the batch.
- The routing that is returned is the one that gave the logits; of a mixture of experts, every block's.
- Weights are read through the model's own parameters: whoever writes those in place changes the next step.
- A pass that is given up half-way is as if it had never begun: what it wrote lies where only its repetition writes, and
  nothing reads there before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from rollout_svc.embedded.model import Block, TinyTransformer

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_ROWS: Final = 4
"""Fewest rows a matrix product is given."""

LENGTH_STEP: Final = 32
"""Tokens; attended lengths are multiples of this."""

_MASKED: Final = float("-inf")

Routing = list[Tensor]
"""The experts that were taken, for each block that has some, in order."""


def padded_length(tokens: int) -> int:
    """Round a number of tokens up to a multiple of `LENGTH_STEP`."""
    return -(-tokens // LENGTH_STEP) * LENGTH_STEP


class GivenUpError(Exception):
    """Raised when a forward pass was given up half-way."""


class CachedForward:
    """Computes logits for rows of a key-value cache that it owns.

    Callers run it under `torch.inference_mode()`, from one thread.
    """

    __slots__ = (
        *("_given_up", "_heads", "_keys", "_kv", "_layers", "_model", "_places", "_row_index", "_scale", "_shape"),
        "_values",
        "rows",
    )

    def __init__(self, model: TinyTransformer, rows: int, given_up: Callable[[], bool] = lambda: False) -> None:
        """Make an empty cache.

        Args:
            model: whose logits they are.
            rows: of the cache.
            given_up: whether the pass under way is wanted no more; asked several times in each block.
        """
        config = model.config
        length = padded_length(config.context)
        self._model = model
        self._given_up = given_up
        self.rows = max(rows, MIN_ROWS)
        self._heads = config.heads
        self._scale = config.head_width**-0.5
        self._layers = [_LayerWeights(block) for block in model.blocks if isinstance(block, Block)]
        self._shape = (2, self.rows, config.heads, length, config.head_width)
        self.take_back()
        self._places = torch.arange(length)
        self._row_index = torch.arange(self.rows)

    def take_back(self) -> None:
        """Make the cache, with nothing in it."""
        _, rows, heads, length, width = self._shape
        # Zeros, not garbage: a masked place has weight 0, and 0 times NaN would still be NaN.
        self._kv = [torch.zeros(self._shape) for _ in self._layers]
        self._keys = [kv[0].view(rows * heads, length, width) for kv in self._kv]
        self._values = [kv[1].view(rows * heads, length, width) for kv in self._kv]

    def give_up(self) -> None:
        """Free the cache, of which no row is in use; nothing is computed until `take_back`."""
        self._kv, self._keys, self._values = [], [], []

    def prefill(self, prompts: list[list[int]], first_row: int) -> tuple[Tensor, Routing]:
        """Fill consecutive rows with prompts of one padded length, and return what follows each.

        Args:
            prompts: Token ids, none empty, all with the same `padded_length`.
            first_row: The row of the first prompt; the others follow.

        Returns:
            float32[len(prompts), vocab_size], and for each block of experts int64[len(prompts), padded length, top_k].

        Raises:
            GivenUpError: the rows hold nothing.
        """
        count = len(prompts)
        length = padded_length(len(prompts[0]))
        ids = torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts])
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        model, heads, rows = self._model, self._heads, slice(first_row, first_row + count)
        places = self._places[:length].clamp(max=model.config.context - 1)
        hidden = model.tokens.weight[ids] + model.positions.weight[places]
        routing: Routing = []
        for layer, kv in zip(self._layers, self._kv, strict=True):
            self._go_on()
            qkv = layer.qkv(hidden).view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            kv[:, rows, :, :length] = qkv[1:]
            mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            hidden = layer.finish(hidden, mixed.transpose(1, 2).reshape(count, length, -1), routing, self._go_on)
        ends = hidden[self._row_index[:count], last]
        if count < MIN_ROWS:
            ends = torch.cat([ends, ends.new_zeros(MIN_ROWS - count, ends.shape[1])])
        return self._logits(ends)[:count], routing

    def decode(self, ids: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Routing]:
        """Feed one token to each of the first rows, and return what follows it.

        Args:
            ids: int64[R], R at least `MIN_ROWS`; row r gets `ids[r]`.
            positions: int64[R], where in its sequence the token stands; the row holds all tokens before it.
            longest: The largest of `positions`.

        Returns:
            float32[R, vocab_size], and for each block of experts int64[R, top_k].

        Raises:
            GivenUpError: the rows hold what they held.
        """
        model, heads, count = self._model, self._heads, ids.shape[0]
        length = padded_length(longest + 1)
        rows = self._row_index[:count]
        flat = count * heads
        hidden = model.tokens.weight.index_select(0, ids) + model.positions.weight.index_select(0, positions)
        later = self._places[:length] > positions[:, None]
        bias = torch.zeros(count, 1, 1, length).masked_fill_(later[:, None, None], _MASKED)
        bias = bias.expand(count, heads, 1, length).reshape(flat, 1, length)
        routing: Routing = []
        for index, layer in enumerate(self._layers):
            self._go_on()
            qkv = layer.qkv(hidden).view(count, 3, heads, -1)
            self._kv[index][:, rows, :, positions] = qkv[:, 1:]
            query = qkv[:, 0].reshape(flat, 1, -1)
            keys = self._keys[index][:flat, :length].transpose(1, 2)
            weights = torch.softmax(torch.baddbmm(bias, query, keys, alpha=self._scale), dim=-1)
            mixed = torch.bmm(weights, self._values[index][:flat, :length])
            hidden = layer.finish(hidden, mixed.view(count, -1), routing, self._go_on)
        return self._logits(hidden), routing

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of one row over another's."""
        for kv in self._kv:
            kv[:, target, :, :length] = kv[:, source, :, :length]

    def _go_on(self) -> None:
        if self._given_up():
            raise GivenUpError

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = self._model.norm
        hidden = functional.layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return functional.linear(hidden, self._model.head.weight)


class _LayerWeights:
    """References to one block's parameters, so that a step does not walk the module tree."""

    __slots__ = ("_attention", "_contract", "_eps", "_expand", "_experts", "_feed", "_project", "_shape")

    def __init__(self, block: Block) -> None:
        norm, feed = block.attention_norm, block.feed_norm
        self._shape = norm.normalized_shape
        self._eps = norm.eps
        self._attention = (norm.weight, norm.bias, block.qkv.weight, block.qkv.bias)
        self._project = (block.project.weight, block.project.bias)
        self._feed = (feed.weight, feed.bias)
        self._experts = block.experts
        if block.experts is None:
            self._expand = (block.expand.weight, block.expand.bias)
            self._contract = (block.contract.weight, block.contract.bias)

    def qkv(self, hidden: Tensor) -> Tensor:
        """Normalise and project to queries, keys and values: float[..., width] to float[..., 3 * width]."""
        norm_weight, norm_bias, weight, bias = self._attention
        normed = functional.layer_norm(hidden, self._shape, norm_weight, norm_bias, self._eps)
        return functional.linear(normed, weight, bias)

    def finish(self, hidden: Tensor, mixed: Tensor, routing: Routing, go_on: Callable[[], None]) -> Tensor:
        """Add the attention's output and the feed-forward's to the residual; appends the experts taken to `routing`."""
        go_on()
        hidden = hidden + functional.linear(mixed, *self._project)
        normed = functional.layer_norm(hidden, self._shape, *self._feed, self._eps)
        if self._experts is None:
            expanded = functional.gelu(functional.linear(normed, *self._expand))
            go_on()
            fed = functional.linear(expanded, *self._contract)
        else:
            fed, chosen = self._experts(normed)
            routing.append(chosen)
        return hidden + fed
