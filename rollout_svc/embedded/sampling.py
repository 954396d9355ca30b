"""What a request asks of the sampler, and one vectorised draw for many requests.

Invariants:
- A row's token depends on its own logits, settings and uniform number only, never on the other rows.
- The uniform number of a token is a function of the request's seed and of the token's place in the whole sequence, so a
  request cut short and resumed with its tokens as prompt draws what the uninterrupted one would have drawn.
- A log-probability is that of the raw logits: temperature, top-p and top-k do not enter it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_SEED_BITS: Final = 63
"""A generator takes seeds of 64 bits, signed; any integer is folded into the non-negative ones."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: Most tokens to produce; None for as many as the context holds.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_p: Keep the likeliest tokens until their mass reaches this; 1 keeps all. In (0, 1].
        top_k: Keep this many of the likeliest tokens; None keeps all.
        stop: Strings that end the output once they appear in its text.
        stop_token_ids: Ids that end the output, beside the vocabulary's end token.
        ignore_eos: Do not stop at the vocabulary's end token.
        seed: Fixes the draws; None for fresh ones.
        skip_special_tokens: Leave special tokens out of the text.
        no_stop_trim: Leave the stop string in the text.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be ruled out before the draw."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


def draw_uniforms(seed: int | None, count: int) -> Tensor:
    """Return float32[count] in [0, 1): the numbers that belong to places 0 to count - 1 of a sequence."""
    folded = secrets.randbits(_SEED_BITS) if seed is None else seed & ((1 << _SEED_BITS) - 1)
    generator = torch.Generator().manual_seed(folded)
    return torch.rand(count, generator=generator)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of B requests as columns.

    Attributes:
        temperature: float32[B, 1], 1 where the request is greedy.
        greedy: bool[B], or None when no request is.
        filtered: int64[F], the rows with a top-p or a top-k, or None when there are none.
        top_p: float32[F, 1].
        top_k: int64[F, 1].
    """

    temperature: Tensor
    greedy: Tensor | None
    filtered: Tensor | None
    top_p: Tensor
    top_k: Tensor

    @classmethod
    def of(cls, requests: list[Sampling], vocab_size: int) -> SamplingRows:
        """Stack the settings of some requests, in order."""
        greedy = [request.temperature == 0 for request in requests]
        filtered = [row for row, request in enumerate(requests) if request.filtered]
        return cls(
            temperature=torch.tensor([[request.temperature or 1.0] for request in requests]),
            greedy=torch.tensor(greedy) if any(greedy) else None,
            filtered=torch.tensor(filtered) if filtered else None,
            top_p=torch.tensor([[requests[row].top_p] for row in filtered]),
            top_k=torch.tensor([[requests[row].top_k or vocab_size] for row in filtered]),
        )


def sample(logits: Tensor, rows: SamplingRows, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: float32[B, vocab_size].
        rows: The settings of the same B requests.
        uniforms: float32[B] in [0, 1).

    Returns:
        int64[B] token ids, and float32[B], their log-probabilities under the raw logits.
    """
    chances = torch.softmax(logits / rows.temperature, dim=-1)
    if rows.filtered is not None:
        chances[rows.filtered] = _rule_out(chances[rows.filtered], rows.top_p, rows.top_k)
    mass = chances.cumsum(dim=-1)
    # The first place whose mass exceeds the target; its chance is above zero, for that is where the mass grew.
    ids = (mass <= uniforms[:, None] * mass[:, -1:]).sum(dim=-1)
    if rows.greedy is not None:
        ids = torch.where(rows.greedy, logits.argmax(dim=-1), ids)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[:, None]).squeeze(1)
    return ids, logprobs


def _rule_out(chances: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero the chances outside the top-k and outside the top-p, both taken on the given chances."""
    ordered, index = chances.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(chances.shape[-1])
    kept = (rank < top_k) & ((before < top_p) | (rank == 0))
    return torch.zeros_like(chances).scatter_(1, index, ordered * kept)
