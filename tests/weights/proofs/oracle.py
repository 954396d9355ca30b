"""What logprobs have to be, computed without the engine: from the models, the tokens, and who made which.

- `plain` is the model's own forward pass over a whole sequence: no cache, one pass, one set of weights.
- `replay` is the same with weights of its own for each position. It goes layer by layer over all positions at once; a
  position's queries, keys, values and feed-forward are of its own weights, and it attends to what the weights of
  earlier positions made of those. Nothing of it is shared with the engine's cached pass.

Which weights computed a position: the logits of a token come from the position before it, so position t was computed by
those that made token t + 1. What was computed anew, as a prompt is, was computed by those that made the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rollout_svc.embedded.model import Block, TinyTransformer

Models = Mapping[int, TinyTransformer]


def plain(models: Models, sample: Mapping[str, Any]) -> list[float]:
    """The logprob of each response token by a plain forward pass under the version that its span names."""
    prompt, ids = sample["prompt_ids"], sample["response_ids"]
    versions = versions_of(sample)
    with torch.inference_mode():
        told = {version: _chosen(models[version](torch.tensor([prompt + ids]))[0], prompt, ids) for version in versions}
    return [told[version][place] for place, version in enumerate(versions)]


def replayed(models: Models, sample: Mapping[str, Any], computed_anew: Collection[int] = ()) -> list[float]:
    """The logprob of each response token with the cache that it was made with.

    Args:
        models: by version.
        sample: as in a batch.
        computed_anew: places in the response before whose token everything before it was computed anew.
    """
    prompt, ids = sample["prompt_ids"], sample["response_ids"]
    versions = versions_of(sample)
    found: list[float] = []
    for start, end in pairwise([*sorted({0, *computed_anew}), len(ids)]):
        by = [versions[max(start, place + 1 - len(prompt))] for place in range(len(prompt) + end - 1)]
        if start < end:
            logits = replay(models, [*prompt, *ids[: end - 1]], by)
            found += _chosen(logits, prompt, ids[:end])[start:]
    return found


def replay(models: Models, tokens: Sequence[int], by: Sequence[int], *, experts: list[Tensor] | None = None) -> Tensor:
    """Compute float32[T, vocab_size], the logits after each of T tokens, position t by the weights `by[t]`.

    To `experts` is appended int64[T, top_k] for each layer that has some: those that were taken.
    """
    ids, places = torch.tensor(tokens), torch.arange(len(tokens))
    with torch.inference_mode():
        hidden = _each(by, lambda version: models[version].tokens(ids) + models[version].positions(places))
        for layer in range(models[by[0]].config.layers):
            blocks = {version: _block(models[version], layer) for version in set(by)}
            hidden = _layer(blocks, by, hidden, experts)
        return _each(by, lambda version: models[version].head(models[version].norm(hidden)))


def _layer(blocks: Mapping[int, Block], by: Sequence[int], hidden: Tensor, experts: list[Tensor] | None) -> Tensor:
    """One block over float32[T, width], each position by the block of its own weights."""
    count, heads = len(by), blocks[by[0]].heads
    places = torch.arange(count)
    qkv = _each(by, lambda version: blocks[version].qkv(blocks[version].attention_norm(hidden)))
    query, key, value = qkv.view(count, 3, heads, -1).permute(1, 2, 0, 3)
    scores = (query @ key.transpose(1, 2)) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(places[None, :] > places[:, None], float("-inf"))
    mixed = (torch.softmax(scores, dim=-1) @ value).transpose(0, 1).reshape(count, -1)
    attended = _each(by, lambda version: hidden + blocks[version].project(mixed))
    if experts is not None and blocks[by[0]].experts is not None:
        experts.append(_each(by, lambda version: _mixture(blocks[version], attended)[1]))
    return _each(by, lambda version: attended + _fed(blocks[version], attended))


def _each(by: Sequence[int], compute: Callable[[int], Tensor]) -> Tensor:
    """What every version makes of all positions; each position keeps its own's."""
    found = {version: compute(version) for version in set(by)}
    return torch.stack([found[version][place] for place, version in enumerate(by)])


def routed(models: Models, sample: Mapping[str, Any], *, kept: bool) -> Tensor:
    """Which experts each token but the last went through when it was first computed: int64[T, moe_layers, top_k].

    Args:
        models: by version.
        sample: as in a batch.
        kept: with the cache that was there; otherwise everything before was computed anew by then.
    """
    prompt, ids, versions = sample["prompt_ids"], sample["response_ids"], versions_of(sample)
    tokens = [*prompt, *ids[:-1]]
    by = [versions[max(0, place + 1 - len(prompt))] for place in range(len(tokens))]
    found: dict[int, Tensor] = {}
    for version in set(by):
        taken: list[Tensor] = []
        replay(models, tokens, by if kept else [version] * len(tokens), experts=taken)
        found[version] = torch.stack(taken, dim=1)
    return torch.stack([found[version][place] for place, version in enumerate(by)])


def versions_of(sample: Mapping[str, Any]) -> list[int]:
    """The version of each response token; of one that the model did not make, that of the next it made.

    The spans cover what the model made, and nothing else, in order, each version once.
    """
    spans = sample["weight_versions"]
    assert all(span["start"] < span["end"] for span in spans), spans
    named = [span["version"] for span in spans]
    assert named == sorted(set(named)), spans
    found: dict[int, int] = {}
    for span in spans:
        for place in range(span["start"], span["end"]):
            assert place not in found, spans
            found[place] = span["version"]
    made = [place for place, mask in enumerate(sample["loss_mask"]) if mask]
    assert list(found) == made, (spans, made)
    return [found[min(later for later in made if later >= place)] for place in range(len(sample["response_ids"]))]


def _block(model: TinyTransformer, layer: int) -> Block:
    block = model.blocks[layer]
    assert isinstance(block, Block)
    return block


def _fed(block: Block, hidden: Tensor) -> Tensor:
    """What a block's feed-forward adds, written out."""
    if block.experts is not None:
        return _mixture(block, hidden)[0]
    fed: Tensor = block.contract(functional.gelu(block.expand(block.feed_norm(hidden))))
    return fed


def _mixture(block: Block, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What a block's experts add, and which they are."""
    assert block.experts is not None
    fed, taken = block.experts(block.feed_norm(hidden))
    return fed, taken


def _chosen(logits: Tensor, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """The logprobs of a response, of float[T, vocab_size] over its whole sequence."""
    rows = torch.log_softmax(logits[len(prompt) - 1 : len(prompt) + len(ids) - 1], dim=-1)
    return [float(row[token]) for row, token in zip(rows, ids, strict=True)]
